//! The table of C functions against the symbols of NVIDIA's driver.

use sluice_cuda_abi::{attributes::guest_mask, symbols, sys::CUresult};
use sluice_protocol::{
    calls::{C, WIRE},
    session::refusal,
};
use std::collections::BTreeSet;

/// The shim could never export a row whose symbol does not exist.
// Promise: C2
#[test]
fn every_c_function_of_the_table_is_a_symbol_of_the_driver() {
    for row in C {
        let export = symbols::export_index(row.name).and_then(symbols::export);
        let export = export.unwrap_or_else(|| panic!("{} is not a symbol of the driver", row.name));
        assert_eq!(row.since, export.version, "{} appeared in", row.name);
        for name in row.per_thread {
            let twin = symbols::export_index(name).and_then(symbols::export);
            let twin = twin.unwrap_or_else(|| panic!("{name} is not a symbol of the driver"));
            assert!(twin.per_thread, "{name} is not a per-thread form");
            assert_eq!(twin.base, export.base, "{name} is no form of {}", row.name);
        }
    }
}

/// The functions that public clients call at all: runtimes, cuda-python, CuPy, numba-cuda, PyTorch, Triton, JAX.
// Promise: C104
#[test]
fn every_function_that_clients_call_is_served() {
    let served: BTreeSet<&str> = C
        .iter()
        .filter(|row| row.class != "driver")
        .flat_map(|row| std::iter::once(row.name).chain(row.per_thread.iter().copied()))
        .collect();
    let listed: Vec<&str> = include_str!("../../tests/data/clients-106.txt").lines().collect();
    assert_eq!(listed.len(), 106);
    let missing: Vec<&&str> = listed.iter().filter(|name| !served.contains(**name)).collect();
    assert!(missing.is_empty(), "not served: {missing:?}");
}

#[test]
fn refusals_of_device_and_daemon_have_the_numbers_of_the_driver() {
    let refusals = [
        (refusal::INVALID_VALUE, CUresult::CUDA_ERROR_INVALID_VALUE),
        (refusal::OUT_OF_MEMORY, CUresult::CUDA_ERROR_OUT_OF_MEMORY),
        (refusal::DEVICE_UNAVAILABLE, CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE),
        (refusal::SYSTEM_DRIVER_MISMATCH, CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
    ];
    for (number, result) in refusals {
        assert_eq!(number, result as u32, "{result:?}");
    }
}

#[test]
fn no_symbol_is_served_twice() {
    let mut seen = BTreeSet::new();
    for row in C {
        for name in [row.name].iter().chain(row.per_thread) {
            assert!(seen.insert(*name), "{name} stands in the table twice");
        }
        assert!(
            ["local", "hand", "scalar", "forward", "contextless", "driver"].contains(&row.class),
            "{}: {}",
            row.name,
            row.class
        );
    }
}

/// Another parameter could be refused when the object is already on its way.
#[test]
fn object_that_a_forwarded_call_makes_or_ends_is_its_last_parameter() {
    for row in C.iter().filter(|row| ["forward", "contextless"].contains(&row.class)) {
        let call = WIRE.iter().find(|call| row.call == [call.name]);
        let call = call.unwrap_or_else(|| panic!("{} makes no call", row.name));
        let others = call.parameters.split_last().map_or(&[][..], |(_, others)| others);
        for parameter in others {
            let moves = ["Mint", "Take"].iter().any(|kind| parameter.kind.starts_with(kind));
            assert!(!moves, "{} of {} must be the last parameter", parameter.name, call.name);
        }
    }
}

/// A form whose default stream is the thread's own must be served wherever the plain form is: programs compiled for
/// per-thread streams call only that one.
// Promise: C2
#[test]
fn every_per_thread_form_of_a_served_function_is_served() {
    for row in C.iter().filter(|row| row.class != "driver") {
        for suffix in ["_ptds", "_ptsz"] {
            let twin = format!("{}{suffix}", row.name);
            if symbols::export_index(&twin).is_some() {
                assert!(row.per_thread.contains(&twin.as_str()), "{twin} is missing");
            }
        }
    }
}

/// A program that reads an attribute and then calls the function that it promises must not be refused; and a forgotten mask must not
/// hide a function that is served.
// Promise: C9
#[test]
fn attributes_promise_exactly_what_is_served() {
    // The abilities that an attribute reports, each with a function that has it. Some attributes report the same one.
    let features: &[(&[i32], &str)] = &[
        (&[19, 41], "cuMemHostGetDevicePointer_v2"), // CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING
        (&[21, 22, 23, 24, 25, 26, 27, 28, 29], "cuArrayCreate_v2"), // sizes of textures
        (&[42, 43, 47, 48, 49, 52, 53, 54], "cuArray3DCreate_v2"), // of layers and cubes
        (&[44, 45, 46, 69, 70, 71, 72], "cuTexObjectCreate"), // gathers, linear textures
        (&[55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68], "cuSurfObjectCreate"),
        (&[73, 74, 77], "cuMipmappedArrayCreate"),
        (&[78], "cuStreamCreateWithPriority"), // STREAM_PRIORITIES_SUPPORTED
        (&[83], "cuMemAllocManaged"),          // MANAGED_MEMORY
        (&[89], "cuMemPrefetchAsync"),         // CONCURRENT_MANAGED_ACCESS
        (&[99], "cuMemHostRegister_v2"),       // HOST_REGISTER_SUPPORTED
        (&[92, 93, 94], "cuStreamWriteValue32"), // CAN_USE_STREAM_MEM_OPS_V1
        (&[122, 123], "cuStreamWaitValue32_v2"), // CAN_USE_64_BIT_STREAM_MEM_OPS
        (&[95], "cuLaunchCooperativeKernel"),  // COOPERATIVE_LAUNCH
        (&[96], "cuLaunchCooperativeKernelMultiDevice"),
        (&[102], "cuMemCreate"),                  // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (&[103], "cuMemExportToShareableHandle"), // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        (&[108, 109], "cuStreamSetAttribute"),    // MAX_PERSISTING_L2_CACHE_SIZE
        (&[112, 121], "cuMemMapArrayAsync"),      // SPARSE_CUDA_ARRAY_SUPPORTED
        (&[114], "cuImportExternalSemaphore"),    // TIMELINE_SEMAPHORE_INTEROP_SUPPORTED
        (&[115], "cuMemGetDefaultMemPool"),       // MEMORY_POOLS_SUPPORTED
        (&[119], "cuMemPoolExportToShareableHandle"), // MEMPOOL_SUPPORTED_HANDLE_TYPES
        (&[120], "cuOccupancyMaxActiveClusters"), // CLUSTER_LAUNCH
        (&[124, 146, 152], "cuMemGetHandleForAddressRange"), // DMA_BUF_SUPPORTED
        (&[125], "cuIpcGetEventHandle"),          // IPC_EVENT_SUPPORTED
        (&[126], "cuLaunchKernelEx"),             // MEM_SYNC_DOMAIN_COUNT
        (&[127], "cuTensorMapEncodeIm2colWide"),  // TENSOR_MAP_ACCESS_SUPPORTED
        (&[132], "cuMulticastCreate"),            // MULTICAST_SUPPORTED
        (&[135, 138, 151, 159], "cuStreamBeginCaptureToCig"),
        (&[136, 137], "cuMemBatchDecompressAsync"),
        (&[139, 140], "cuDeviceGetPCIBusId"), // PCI ids of device and subsystem
        (&[147, 148], "cuDeviceGetHostAtomicCapabilities"),
        (&[153, 154, 155, 156, 158], "cuLogicalEndpointCreate"),
    ];
    // Facts about a device, on which no function depends.
    let facts = (1..=18).chain([20]).chain(30..=40).chain([50, 51, 75, 76]).chain(79..=82);
    let facts = facts.chain([86, 87, 90, 97, 106, 111, 150]);
    // Abilities of functions that exist for other memory and devices as well; their own tests refuse them.
    let kinds_of_memory =
        [84, 85, 88, 91, 98, 100, 101, 104, 105, 107, 110, 113, 116, 117, 118, 128, 129, 130, 131]
            .into_iter()
            .chain([133, 134, 141, 142, 143, 144, 145, 149, 157, 161]);
    for attribute in kinds_of_memory.clone() {
        assert!(guest_mask(attribute).is_some_and(|value| value <= 0), "attribute {attribute} is shown");
    }
    let mut numbers: Vec<i32> = features.iter().flat_map(|(attributes, _)| *attributes).copied().collect();
    numbers.extend(facts.clone().chain(kinds_of_memory));
    numbers.sort_unstable();
    // CUDA 13.5 reserves 160 for later use.
    let all: Vec<i32> = (1..=161).filter(|number| *number != 160).collect();
    assert_eq!(numbers, all, "each attribute of the header stands here once");
    for attribute in facts {
        assert_eq!(guest_mask(attribute), None, "attribute {attribute} is a fact");
    }
    let features =
        features.iter().flat_map(|(attributes, function)| attributes.iter().map(move |at| (*at, *function)));
    for (attribute, function) in features {
        assert!(symbols::export_index(function).is_some(), "{function} is not a symbol of the driver");
        let served = C.iter().any(|row| row.class != "driver" && row.name == function);
        // A mask may show a part of the ability.
        let shown = guest_mask(attribute).is_none_or(|value| value > 0);
        assert_eq!(
            shown, served,
            "attribute {attribute} is shown ({shown}), {function} is served ({served})"
        );
    }
}
