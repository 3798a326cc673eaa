//! The symbol table, compared with its data file and with a simple look-up.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sluice_cuda_abi::symbols::{self, CUDA_VERSION, EXPORTS, Lookup};

/// The data file: base name → (driver version, symbol).
fn data() -> BTreeMap<String, Vec<(u32, String)>> {
    let json: serde_json::Value = serde_json::from_str(include_str!("../data/procmap.json")).unwrap();
    let form = |form: &serde_json::Value| {
        let version = form["driver_version"].as_u64().unwrap().try_into().unwrap();
        (version, form["symbol"].as_str().unwrap().to_owned())
    };
    let bases = json.as_object().unwrap();
    bases
        .iter()
        .map(|(base, forms)| (base.clone(), forms.as_array().unwrap().iter().map(form).collect()))
        .collect()
}

fn per_thread(symbol: &str) -> bool {
    symbol.ends_with("_ptsz") || symbol.ends_with("_ptds")
}

/// The result of the rules, computed without a table.
fn model<'a>(
    data: &'a BTreeMap<String, Vec<(u32, String)>>,
    name: &str,
    version: u32,
    flags: u64,
) -> Result<&'a str, Lookup> {
    let forms = data.get(name).ok_or(Lookup::NotFound)?;
    let newest = |kind| {
        let old_enough =
            forms.iter().filter(|(since, symbol)| *since <= version && per_thread(symbol) == kind);
        old_enough.max_by_key(|(since, _)| *since).map(|(_, symbol)| symbol.as_str())
    };
    let found =
        if flags == symbols::FLAG_PER_THREAD_STREAM { newest(true).or(newest(false)) } else { newest(false) };
    found.ok_or(Lookup::VersionTooLow)
}

fn found(name: &[u8], version: u32, flags: u64) -> Result<&'static str, Lookup> {
    match symbols::lookup(name, version, flags) {
        Lookup::Found(index) => Ok(EXPORTS[index]),
        other => Err(other),
    }
}

// Promise: C2
#[test]
fn export_list_is_complete_sorted_and_unique() {
    assert_eq!(EXPORTS.len(), 723);
    assert!(EXPORTS.is_sorted_by(|a, b| a < b));
    let mut expected: Vec<_> = data().into_values().flatten().map(|(_, symbol)| symbol).collect();
    expected.sort();
    assert_eq!(EXPORTS, expected);
}

#[test]
fn every_export_is_found_under_its_name() {
    for (index, name) in EXPORTS.iter().enumerate() {
        assert_eq!(symbols::export_index(name), Some(index));
        let export = symbols::export(index).unwrap();
        assert_eq!((export.name, export.per_thread), (*name, per_thread(name)));
        assert!(data()[export.base].contains(&(export.version, (*name).to_owned())), "{name}");
    }
    assert_eq!(symbols::export(EXPORTS.len()), None);
    for name in ["", "cu", "cuInitX", "cuINIT", "cuMemAlloc_v3"] {
        assert_eq!(symbols::export_index(name), None, "{name:?}");
    }
}

macro_rules! list {
    ($($name:ident,)*) => { [$(stringify!($name)),*] };
}

#[test]
fn export_macro_names_every_export() {
    let names = sluice_cuda_abi::for_each_export!(list);
    assert_eq!(EXPORTS, names);
}

/// Every (name, version, flags) at which a result can change, and its neighbours.
#[test]
fn lookups_equal_the_model_at_every_version() {
    let data = data();
    let mut versions: Vec<u32> = data
        .values()
        .flatten()
        .flat_map(|(v, _)| [v - 1, *v, v + 1])
        .chain([0, 1, CUDA_VERSION, u32::MAX])
        .collect();
    versions.sort_unstable();
    versions.dedup();
    for name in data.keys() {
        for &version in &versions {
            for flags in 0..=2 {
                let expected = model(&data, name, version, flags);
                assert_eq!(found(name.as_bytes(), version, flags), expected, "{name} {version} {flags}");
            }
        }
    }
}

#[test]
fn lookup_finds_base_names_only() {
    let data = data();
    for name in EXPORTS.iter().filter(|name| !data.contains_key(**name)) {
        assert_eq!(symbols::lookup(name.as_bytes(), CUDA_VERSION, 0), Lookup::NotFound, "{name}");
    }
    for name in ["", "cuSubgridCreate", "cuMemAlloc\0", "cuMemAl", "cuMemAllocX"] {
        assert_eq!(symbols::lookup(name.as_bytes(), CUDA_VERSION, 0), Lookup::NotFound, "{name:?}");
    }
}

#[test]
fn lookups_of_known_functions_return_their_known_versions() {
    assert_eq!(found(b"cuMemAlloc", 2000, 0), Ok("cuMemAlloc"));
    assert_eq!(found(b"cuMemAlloc", 3010, 0), Ok("cuMemAlloc"));
    assert_eq!(found(b"cuMemAlloc", 3020, 0), Ok("cuMemAlloc_v2"));
    assert_eq!(found(b"cuMemcpyHtoD", CUDA_VERSION, 0), Ok("cuMemcpyHtoD_v2"));
    assert_eq!(found(b"cuMemcpyHtoD", CUDA_VERSION, 1), Ok("cuMemcpyHtoD_v2"));
    assert_eq!(found(b"cuMemcpyHtoD", CUDA_VERSION, 2), Ok("cuMemcpyHtoD_v2_ptds"));
    assert_eq!(found(b"cuMemcpyHtoD", 6050, 2), Ok("cuMemcpyHtoD_v2"), "the per-thread form is too new");
    assert_eq!(found(b"cuGetProcAddress", 11030, 0), Ok("cuGetProcAddress"));
    assert_eq!(found(b"cuGetProcAddress", 12000, 0), Ok("cuGetProcAddress_v2"));
    assert_eq!(found(b"cuCtxCreate", 12050, 0), Ok("cuCtxCreate_v4"));
    assert_eq!(symbols::lookup(b"cuGetProcAddress", 11020, 0), Lookup::VersionTooLow);
    assert!((0..=2).all(symbols::valid_flags) && !symbols::valid_flags(3) && !symbols::valid_flags(u64::MAX));
}

proptest! {
    #[test]
    fn lookup_of_any_bytes_equals_the_model(name in prop::collection::vec(any::<u8>(), 0..64), version: u32) {
        let data = data();
        let expected = std::str::from_utf8(&name).map_or(Err(Lookup::NotFound), |n| model(&data, n, version, 2));
        prop_assert_eq!(found(&name, version, 2), expected);
    }

    #[test]
    fn lookup_of_damaged_names_equals_the_model(
        index in 0..EXPORTS.len(), at: prop::sample::Index, byte in 32_u8..127, version in 0_u32..14000, flags in 0_u64..3,
    ) {
        let data = data();
        let mut name = EXPORTS[index].as_bytes().to_vec();
        let at = at.index(name.len());
        name[at] = byte;
        let text = std::str::from_utf8(&name).unwrap();
        prop_assert_eq!(found(&name, version, flags), model(&data, text, version, flags));
        prop_assert_eq!(symbols::export_index(text), EXPORTS.iter().position(|export| *export == text));
    }
}
