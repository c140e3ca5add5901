// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Finds the files of kernel modules, orders them by their dependencies, and reads their module
//! information.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Context as _, Result};

use crate::progress::output;

pub(crate) fn name_of(file: &Path) -> String {
    file.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .replace('-', "_")
}

/// Files of modules, by name. If a name is added twice, the first file stays.
#[derive(Debug, Default, Clone)]
pub(crate) struct Index(BTreeMap<String, PathBuf>);

impl Index {
    pub(crate) fn add(&mut self, file: PathBuf) {
        self.0.entry(name_of(&file)).or_insert(file);
    }

    pub(crate) fn add_tree(&mut self, directory: &Path) -> Result<()> {
        let entries = fs::read_dir(directory)
            .with_context(|| format!("cannot read {}", directory.display()))?;
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.add_tree(&path)?;
            } else if kind.is_file() && path.extension().is_some_and(|suffix| suffix == "ko") {
                self.add(path);
            }
        }
        Ok(())
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&PathBuf> {
        self.0.get(name)
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.0.values()
    }

    /// Returns the named modules and all their dependencies. A dependency comes before the modules
    /// that need it.
    pub(crate) fn closure(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut order = Vec::new();
        for name in names {
            self.visit(name, &mut order, 0)?;
        }
        Ok(order)
    }

    /// Returns the named modules that this kernel has, and all their dependencies. A dependency
    /// comes before the modules that need it.
    pub(crate) fn closure_of_present(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let present: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| self.contains(name))
            .collect();
        self.closure(&present)
    }

    fn visit(&self, name: &str, order: &mut Vec<PathBuf>, depth: usize) -> Result<()> {
        let path = self
            .get(name)
            .ok_or_else(|| anyhow!("there is no module {name}"))?;
        if order.contains(path) {
            return Ok(());
        }
        if depth > 32 {
            bail!("{name} depends on itself through other modules");
        }
        for needed in info(path, "depends")?.split(',') {
            if !needed.is_empty() {
                let needed = needed.replace('-', "_");
                self.visit(&needed, order, depth + 1)
                    .with_context(|| format!("needed by {name}"))?;
            }
        }
        order.push(path.clone());
        Ok(())
    }
}

pub(crate) fn undefined(file: &Path) -> Result<Vec<String>> {
    let mut nm = std::process::Command::new("nm");
    let names = output(nm.args(["--undefined-only", "--just-symbols"]).arg(file))?;
    Ok(names.lines().map(str::to_owned).collect())
}

pub(crate) fn has_parameter(file: &Path, name: &str) -> Result<bool> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(after(&bytes, &format!("\0parmtype={name}:")).is_some())
}

/// Returns the bytes after the first occurrence of `key`.
fn after<'a>(bytes: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let mut windows = bytes.windows(key.len());
    let at = windows.position(|window| window == key.as_bytes())?;
    Some(&bytes[at + key.len()..])
}

/// Returns a field of the module information, or an empty string if it is missing.
pub(crate) fn info(file: &Path, field: &str) -> Result<String> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(info_in(&bytes, field))
}

/// Reads a field from the section of module information. The section has strings `name=value`, each
/// terminated by a zero byte.
fn info_in(bytes: &[u8], field: &str) -> String {
    let value = after(bytes, &format!("\0{field}=")).unwrap_or_default();
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&value[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_module() {
        let bytes =
            b"\x7fELF\0\0license=GPL\0depends=ib_core,nvidia\0version=550.1\0srcversion=AB\0";
        assert_eq!(info_in(bytes, "depends"), "ib_core,nvidia");
        assert_eq!(info_in(bytes, "version"), "550.1");
        assert_eq!(info_in(bytes, "nothing"), "");
    }

    #[test]
    fn modules_come_after_what_they_need() {
        let directory = crate::paths::Folder::scratch("modules");
        let write = |name: &str, depends: &str| {
            let text = format!("x\0depends={depends}\0y=z\0");
            fs::write(directory.join(name), text).unwrap();
        };
        write("a.ko", "b-one,c");
        write("b-one.ko", "c");
        write("c.ko", "");
        write("d.ko", "e");
        let mut index = Index::default();
        index.add_tree(&directory).unwrap();
        let names = |wanted: &[&str]| -> Vec<String> {
            index
                .closure(wanted)
                .unwrap()
                .iter()
                .map(|path| name_of(path))
                .collect()
        };
        assert_eq!(names(&["a"]), ["c", "b_one", "a"]);
        assert!(index.closure(&["d"]).is_err());
    }
}
