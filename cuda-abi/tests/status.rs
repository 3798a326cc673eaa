//! Result codes and masked attributes.

use std::collections::BTreeSet;

use sluice_cuda_abi::attributes::{MASKS, correct_dependent, guest_mask};
use sluice_cuda_abi::status;
use sluice_cuda_abi::sys::CUresult;

#[test]
fn every_status_code_has_a_name_and_a_text() {
    assert_eq!(status::ALL.len(), 106);
    assert!(status::ALL.is_sorted_by(|a, b| (*a as u32) < *b as u32));
    for &code in status::ALL {
        let raw = code as u32;
        assert_eq!(status::from_raw(raw), code);
        assert_eq!(status::name(raw).unwrap().to_str().unwrap(), format!("{code:?}"));
        assert!(!status::text(raw).unwrap().is_empty());
    }
    assert_eq!(status::name(700), Some(c"CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_eq!(status::text(0), Some(c"no error"));
}

#[test]
fn unknown_status_number_has_no_name_and_no_text() {
    let known: BTreeSet<u32> = status::ALL.iter().map(|code| *code as u32).collect();
    for raw in (0..2000).chain([u32::MAX]).filter(|raw| !known.contains(raw)) {
        assert_eq!((status::name(raw), status::text(raw)), (None, None), "{raw}");
        assert_eq!(status::from_raw(raw), CUresult::CUDA_ERROR_UNKNOWN);
        assert!(!status::is_sticky(raw));
    }
}

#[test]
fn sticky_codes_match_their_list() {
    let sticky: Vec<u32> = (0..2000).filter(|raw| status::is_sticky(*raw)).collect();
    assert_eq!(sticky, [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911]);
}

#[test]
fn masked_attributes_match_their_list() {
    let zero = [
        84, 85, 88, 91, 96, 98, 100, 101, 104, 105, 107, 110, 112, 113, 114, 116, 117, 118, 121, 124, 128,
        129, 130, 132, 133, 135, 136, 137, 138, 141, 142, 143, 144, 145, 146, 149, 151, 152, 153, 154, 155,
        156, 157, 158, 159, 161,
    ];
    for attribute in -1000..1000 {
        let expected = match attribute {
            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
            119 => Some(1),
            131 | 134 => Some(-1),
            _ => zero.contains(&attribute).then_some(0),
        };
        assert_eq!(guest_mask(attribute), expected, "{attribute}");
        let row = MASKS.iter().find(|mask| mask.attribute == attribute);
        assert_eq!(row.map(|mask| mask.value), expected, "{attribute} in the table");
    }
}

// Promise: C124
#[test]
fn managed_memory_is_shared_while_a_kernel_runs_only_with_native_atomics() {
    const ATOMICS: usize = 86;
    const SHARED: usize = 89;
    for (atomics, shared, expected) in [(1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)] {
        let mut attributes = [7; 100];
        (attributes[ATOMICS], attributes[SHARED]) = (atomics, shared);
        correct_dependent(&mut attributes);
        assert_eq!((attributes[ATOMICS], attributes[SHARED], attributes[88]), (atomics, expected, 7));
    }
    correct_dependent(&mut []);
}
