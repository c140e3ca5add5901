// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Checks that the table of `docs/verification.md` lists each access to shared state, and the
//! memory order on which the access relies.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Text that marks access to shared state in Rust, in addition to the order arguments of atomics.
const RUST: &[&str] = &[
    "_volatile(",
    "_raw(&raw const",
    "SetOnce::new(",
    ".populate(",
    " Cell::new(",
    "UnsafeCell::new(",
    " Sync for ",
    "down_read(",
    "down_write(",
    "smp_",
    "fence(",
    "rcu::",
];

/// The memory orders, strongest first. The test also compares how often each of the first three
/// stands in the table and in the code, so that no access becomes weaker unnoticed.
const ORDERS: [&str; 4] = ["Full", "Release", "Acquire", "Relaxed"];

/// Text that marks access to shared state in C, in addition to definitions of variables.
const C: &[&str] = &[
    "READ_ONCE(",
    "WRITE_ONCE(",
    "DEFINE_SPINLOCK(",
    "DEFINE_MUTEX(",
    "DECLARE_RWSEM(",
    "smp_",
    "rcu_",
    "atomic_",
    "atomic64_",
    "refcount_",
    "xchg(",
    "_bit(",
    "data_race(",
    "complet",
    "static_branch",
    "volatile",
];

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the files of a folder of the repository, without subfolders.
fn files(directory: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(directory);
    let entries = fs::read_dir(path).unwrap().map(Result::unwrap);
    entries
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}

fn without_comments(text: &str) -> String {
    let mut code = String::new();
    let mut parts = text.split("/*");
    code.push_str(parts.next().unwrap_or_default());
    for part in parts {
        code.push_str(part.split_once("*/").map_or("", |(_, rest)| rest));
    }
    code.lines()
        .map(|line| line.split_once("//").map_or(line, |(code, _)| code))
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// Returns `true` if a line of C defines a variable, in the first column.
fn is_variable(line: &str) -> bool {
    let is_set = line.contains(" = ");
    let is_defined = is_set || line.starts_with("static ") && !line.contains('(');
    let is_indented = !line.starts_with(|first: char| first.is_ascii_lowercase());
    is_defined && !is_indented && !line.contains("const ") && !line.starts_with("enum ")
}

/// Returns the number of atomic accesses with this order, which is the last argument of a call.
fn ordered(order: &str, code: &str) -> usize {
    let mut rest = code.split(order);
    let mut before = rest.next().unwrap_or_default();
    let mut found = 0;
    for after in rest {
        let is_word = !before.ends_with(|last: char| last.is_alphanumeric() || last == '_');
        let is_last = after.trim_start_matches([',', ' ', '\n']).starts_with(')');
        found += usize::from(is_word && is_last);
        before = after;
    }
    found
}

/// Returns the number of places in a file that access shared state, recognized by their text.
fn marks(name: &str, text: &str) -> usize {
    let code = without_comments(text);
    let count = |words: &[&str]| -> usize {
        let counts = words.iter().map(|word| code.matches(word).count());
        counts.sum()
    };
    if !name.ends_with(".rs") {
        return count(C) + code.lines().filter(|line| is_variable(line)).count();
    }
    let statics = code.lines().filter(|line| {
        let line = line.trim_start().trim_start_matches("pub(crate) ");
        line.starts_with("static ")
    });
    let orders: usize = ORDERS.iter().map(|order| ordered(order, &code)).sum();
    count(RUST) + orders + statics.count()
}

/// Returns the rows of the table, split into cells.
fn rows(document: &str) -> Vec<Vec<&str>> {
    let (_, section) = document.split_once("\n## Memory order\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| `"));
    lines
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect()
}

/// Returns the texts between backticks.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Parses a cell of the form `FILE` (COUNT) `NAME`, … into the file, the count and the names.
fn place(text: &str) -> (&str, usize, Vec<&str>) {
    let mut all = names(text);
    let file = all.next().unwrap();
    let (_, rest) = text.split_once('(').unwrap();
    let (count, _) = rest.split_once(')').unwrap();
    (file, count.parse().unwrap(), all.collect())
}

#[test]
fn each_access_to_shared_state_is_in_the_table() {
    let document = read("docs/verification.md");
    let rows = rows(&document);
    assert!(rows.len() > 20, "no table");
    let mut listed: BTreeMap<String, usize> = BTreeMap::new();
    let mut orders: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for row in &rows {
        assert_eq!(row.len(), 5, "{row:?}");
        let (first, ..) = place(row[0]);
        let said = orders.entry(first.to_owned()).or_default();
        for (said, order) in said.iter_mut().zip(ORDERS) {
            *said += ordered(order, row[1]);
        }
        for (file, count, names) in row[0].split(';').map(place) {
            let text = read(&format!("src/{file}"));
            assert!(!names.is_empty(), "{}: {file} without a name", row[0]);
            for name in names {
                let last = name.rsplit("::").next().unwrap();
                assert!(text.contains(last), "src/{file} has no {name} any more");
            }
            *listed.entry(file.to_owned()).or_default() += count;
        }
    }
    let mut found = BTreeMap::new();
    for file in files("src") {
        let text = read(&format!("src/{file}"));
        let count = marks(&file, &text);
        if file.ends_with(".rs") {
            let code = without_comments(&text);
            let used = [0, 1, 2].map(|order| ordered(ORDERS[order], &code));
            let said = orders.get(&file).copied().unwrap_or_default();
            assert_eq!(said, used, "src/{file}: {ORDERS:?} in the table, and found");
        }
        listed.entry(file.clone()).or_default();
        found.insert(file, count);
    }
    let wrong: Vec<String> = listed
        .iter()
        .filter(|(file, count)| found.get(*file) != Some(*count))
        .map(|(file, count)| format!("src/{file}: {count} listed, {:?} found", found.get(file)))
        .collect();
    assert!(
        wrong.is_empty(),
        "docs/verification.md, Memory order: add the new access and the order that it relies on, or remove the row of an access that is gone\n{}",
        wrong.join("\n")
    );
}

#[test]
fn each_check_that_the_table_names_exists() {
    let mut text = String::new();
    for directory in [
        "tests/loom/src",
        "tests/fakes",
        "src/history",
        "kunit",
        "tests/verbs/src/cases",
    ] {
        for file in files(directory) {
            text.push_str(&format!("{directory}/{file}\n"));
            text.push_str(&read(&format!("{directory}/{file}")));
        }
    }
    let patches = files("tests/mutants");
    let document = read("docs/verification.md");
    for row in rows(&document) {
        for name in names(row[4]) {
            let is_mutant = patches.contains(&format!("{name}.patch"));
            let is_code = name == "Arc" || text.contains(name);
            assert!(is_mutant || is_code, "{}: there is no {name}", row[0]);
        }
    }
}

#[test]
fn marks_are_counted() {
    let rust = "use atomic::{\n    Full,\n    Release, //\n};\n// x.load(Full)\nstatic READY: Atomic<bool> = Atomic::new(false);\n";
    assert_eq!(marks("a.rs", rust), 1);
    let calls = "a.store(b.load(Relaxed), Release);\nc.xchg(\n    true,\n    Full,\n);\nmatch step { Step::Acquire => 1, Acquired(Unreleased) => 2 }\nunsafe impl Sync for A {}\n";
    assert_eq!(marks("a.rs", calls), 4);
    let c = "/* READ_ONCE(a) */\nstatic int a;\nstatic const int b;\nint c = 1;\nextern int d;\nstatic int f(void)\n{\n\tint e = READ_ONCE(a);\n}\nstruct s {\nstatic struct s d = S(1);\nenum { E = 1 };\nstatic_assert(E <= 1);\n";
    assert_eq!(marks("a.c", c), 4);
}
