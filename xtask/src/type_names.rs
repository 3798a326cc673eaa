//! Names of types: a reader who meets one in a message or a stack trace should know which type it is. So at most two types of the
//! product have the same name, apart from [`COMMON`].

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use crate::sources;

/// Limit of the types with one name.
const TYPES: usize = 2;
/// Names that more types may have, and the reason.
const COMMON: [(&str, &str); 4] = [
    ("Arguments", "the command line of a program, or of a subcommand"),
    ("Command", "the subcommands of a program"),
    ("Error", "the error of a crate, whose path names it"),
    ("Session", "one guest process and its worker: as guest, worker and API see it"),
];
/// Words before the name of a new type.
const DEFINITIONS: [&str; 4] = ["struct", "enum", "union", "trait"];

/// The names of too many types, and the exceptions that are no longer needed.
pub(crate) fn findings(root: &Path) -> Result<Vec<String>> {
    let mut places = BTreeMap::<String, Vec<String>>::new();
    sources::for_each(root, |path, text| {
        if is_product(path) {
            for name in defined(text) {
                places.entry(name.to_owned()).or_default().push(path.display().to_string());
            }
        }
    })?;
    Ok(judge(&places))
}

fn judge(places: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let is_common = |name: &str| COMMON.iter().any(|(common, _)| *common == name);
    let many = places.iter().filter(|(name, places)| places.len() > TYPES && !is_common(name));
    let mut findings: Vec<String> = many
        .map(|(name, places)| format!("{} types are called {name}: {}", places.len(), places.join(", ")))
        .collect();
    let is_rare = |name: &str| places.get(name).is_none_or(|places| places.len() <= TYPES);
    let rare = COMMON.iter().filter(|(name, _)| is_rare(name));
    findings.extend(rare.map(|(name, _)| format!("{name} needs no exception any more")));
    findings
}

/// True for code that ships: neither a test nor automation.
fn is_product(path: &Path) -> bool {
    let mut parts = path.iter().filter_map(|part| part.to_str());
    !path.starts_with("xtask")
        && parts.all(|part| !["tests", "tests.rs", "fuzz", "examples", "benches"].contains(&part))
}

/// The names of the types that a source defines, outside its tests.
fn defined(text: &str) -> Vec<&str> {
    let mut tokens = sources::tokens(text);
    sources::cut_tests(&mut tokens);
    let pairs = tokens.windows(2).filter(|pair| DEFINITIONS.contains(&pair[0]));
    pairs.map(|pair| pair[1]).filter(|name| name.starts_with(char::is_uppercase)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_a_source_are_found_outside_comments_and_tests() {
        let text = "// struct A;\npub(crate) struct B<T>(T); enum C { D } trait E {} struct $name; fn f() { union G {} }\n\
                    #[cfg(test)] mod tests { struct H; }";
        assert_eq!(defined(text), ["B", "C", "E", "G"]);
    }

    #[test]
    fn third_type_of_a_name_and_an_idle_exception_are_found() {
        let mut places: BTreeMap<String, Vec<String>> =
            COMMON.iter().map(|(name, _)| ((*name).to_owned(), vec![String::new(); 3])).collect();
        places.insert("Link".to_owned(), vec!["a.rs".to_owned(), "b.rs".to_owned()]);
        assert_eq!(judge(&places), [""; 0]);
        places.get_mut("Link").unwrap().push("c.rs".to_owned());
        places.remove("Session");
        assert_eq!(
            judge(&places),
            ["3 types are called Link: a.rs, b.rs, c.rs", "Session needs no exception any more"]
        );
    }

    #[test]
    fn only_code_that_ships_is_read() {
        for path in ["protocol/src/ring.rs", "cli/src/main.rs"] {
            assert!(is_product(Path::new(path)), "{path}");
        }
        for path in
            ["tests/src/vm.rs", "backend/device/tests/main.rs", "protocol/src/tests.rs", "xtask/src/main.rs"]
        {
            assert!(!is_product(Path::new(path)), "{path}");
        }
    }
}
