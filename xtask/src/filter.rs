//! The packages that have tests of a filter, found in their sources: a run builds and prepares nothing for others.

use anyhow::Result;
use sluice_tests::paths;

use crate::cargo::Package;
use crate::sources;

/// A package with tests of a filter.
#[derive(Debug)]
pub(crate) struct FilteredPackage {
    /// Its name.
    pub name: String,
    /// True if the package is part of the system tests, which need compiled programs and guests.
    pub of_system: bool,
    /// True if all of these tests are unit tests: they run no program of another package.
    pub is_units: bool,
}

/// The packages that may have a test whose full name contains the filter.
pub(crate) fn packages(filter: &str, all: &[Package]) -> Result<Vec<FilteredPackage>> {
    let mut found = Vec::new();
    // A workspace of its own has targets of another tool in place of tests.
    for package in all.iter().filter(|package| !package.folder.starts_with("fuzz")) {
        let (mut units, mut integration) = (false, false);
        sources::for_each(&paths::workspace().join(&package.folder), |path, text| {
            let start = path.iter().next().unwrap_or_default();
            // Folders of other packages lie in some packages' folders.
            if (start == "src" || start == "tests") && text.contains("test]") {
                let files = path.iter().filter_map(|name| name.to_str());
                let mut modules: Vec<&str> =
                    files.map(|name| name.strip_suffix(".rs").unwrap_or(name)).collect();
                let is_unit = start == "src";
                if is_unit {
                    modules.extend(package.targets.iter().map(String::as_str));
                }
                let tokens = sources::tokens(text);
                modules.extend(named(&tokens, "mod"));
                let functions: Vec<&str> = named(&tokens, "fn").collect();
                if may_match(filter, &modules, &functions) {
                    *(if is_unit { &mut units } else { &mut integration }) = true;
                }
            }
        })?;
        if units || integration {
            let of_system = package.folder.starts_with("tests");
            let name = package.name.clone();
            found.push(FilteredPackage { name, of_system, is_units: !integration && !of_system });
        }
    }
    Ok(found)
}

/// The names of the items of a kind in a source.
fn named<'text>(tokens: &[&'text str], kind: &str) -> impl Iterator<Item = &'text str> {
    tokens.windows(2).filter(move |pair| pair[0] == kind).map(|pair| pair[1])
}

/// True if a path of some of these modules, perhaps with a function at its end, may contain the filter: the first part is the end
/// of a name, the last part the start of one.
fn may_match(filter: &str, modules: &[&str], functions: &[&str]) -> bool {
    let parts: Vec<&str> = filter.split("::").collect();
    let last = parts.len().saturating_sub(1);
    parts.iter().enumerate().all(|(at, part)| {
        let fits = |name: &&str| match (at == 0, at == last) {
            (true, true) => name.contains(part),
            (true, false) => name.ends_with(part),
            (false, true) => name.starts_with(part),
            (false, false) => name == part,
        };
        modules.iter().any(fits) || (at == last && functions.iter().any(fits))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_full_name_may_match_and_another_path_does_not() {
        let modules = ["src", "ring", "sluice_protocol", "tests"];
        let functions = ["record_wraps_at_the_end"];
        for good in
            ["ring::", "sluice_protocol::ring::tests::record", "ing::te", "wraps", "ring::tests::record_w"]
        {
            assert!(may_match(good, &modules, &functions), "{good}");
        }
        for bad in ["ring::wraps", "in::", "session::ring", "tests::session", "string", "at_the_end::"] {
            assert!(!may_match(bad, &modules, &functions), "{bad}");
        }
    }

    #[test]
    fn packages_of_a_filter_are_those_with_its_tests() -> Result<()> {
        let all = Package::all()?;
        let named = |filter: &str| -> Result<Vec<(String, bool, bool)>> {
            let found = packages(filter, &all)?.into_iter();
            Ok(found.map(|one| (one.name, one.of_system, one.is_units)).collect())
        };
        let own = "filter::tests::packages_of_a_filter_are_those_with_its_tests";
        assert_eq!(named(own)?, [("xtask".to_owned(), false, true)]);
        assert_eq!(named("vm::programs")?, [("sluice-tests".to_owned(), true, false)]);
        assert_eq!(named("metrics::")?.len(), 1, "the daemon's integration tests");
        assert_eq!(named("sluice_scheduler::scheduler::")?.len(), 1);
        Ok(())
    }
}
