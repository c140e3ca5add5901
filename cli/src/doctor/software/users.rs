// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Users of a module, from `/proc/modules`. Users of nvidia.ko must be unloaded before nvidia.ko.

use std::collections::{BTreeMap, BTreeSet};

use crate::host::Host;

/// Returns the users of each module, from the fourth word of a line: `nvidia_uvm,gdrdrv,` or `-`.
fn users(text: &str) -> BTreeMap<&str, Vec<&str>> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?;
            let users = words.nth(2)?.split(',').filter(|user| is_name(user));
            Some((name, users.collect()))
        })
        .collect()
}

/// Returns `true` for a valid module name. Only valid names may appear in the command of a fix.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(is_plain)
}

/// Returns all users of a module and then the module, in the order in which rmmod can remove them.
/// Returns `None` if the module is not in the list, or the list cannot be read.
pub(super) fn removal_order(host: &dyn Host, module: &str) -> Option<Vec<String>> {
    let text = host.text("/proc/modules").ok()?;
    let users = users(&text);
    users.contains_key(module).then(|| ordered(&users, module))
}

/// Returns all direct and indirect users of a module, and then the module.
fn ordered(users: &BTreeMap<&str, Vec<&str>>, module: &str) -> Vec<String> {
    let mut order = Vec::new();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    // Each module is on the stack twice. The first entry adds the module's users to the stack. The
    // second entry, with `true`, adds the module to `order` after its users.
    let mut todo = vec![(module, false)];
    while let Some((name, is_done)) = todo.pop() {
        if is_done {
            order.push(name.to_owned());
            continue;
        }
        if !seen.insert(name) {
            continue;
        }
        todo.push((name, true));
        let of_it = users.get(name).into_iter().flatten().rev();
        todo.extend(of_it.map(|user| (*user, false)));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn users_come_before_what_they_use() {
        let text = "nvidia_drm 131072 2 - Live 0x0\nnvidia_modeset 1306624 1 nvidia_drm, Live 0x0\n\
            gdrdrv 24576 0 - Live 0x0 (OE)\nnvidia 56598528 110 gdrdrv,nvidia_modeset, Live 0x0 (OE)\n";
        let order = ordered(&users(text), "nvidia");
        assert_eq!(order, ["gdrdrv", "nvidia_drm", "nvidia_modeset", "nvidia"]);
    }

    #[test]
    fn invalid_names_are_omitted() {
        let text = "nvidia 1 3 a;reboot,`b`,gdrdrv,[permanent], Live 0x0\n";
        assert_eq!(ordered(&users(text), "nvidia"), ["gdrdrv", "nvidia"]);
    }

    #[test]
    fn a_cycle_of_users_ends() {
        let text = "a 1 1 b, Live 0x0\nb 1 1 a, Live 0x0\n";
        assert_eq!(ordered(&users(text), "a"), ["b", "a"]);
    }

    proptest! {
        #[test]
        fn no_list_is_a_panic(text in any::<String>(), lines in "([a-c] 1 1 [-a-c,]{0,6} Live\n){0,6}") {
            for text in [&text, &lines] {
                ordered(&users(text), "a");
            }
        }
    }
}
