//! Models of each capability: what their devices report, and the images that they take.

use std::ptr;

use crate::support::*;

/// Runs a test of this file on a device of a model.
fn on(model: &str, test: &str) {
    let state = new_state();
    let mut command = command(&format!("capability::{test}"), state.path(), model);
    let child =
        command.env("SLUICE_SOFTGPU_MODEL", model).env("SLUICE_SOFTGPU_SCALE", "256").output().unwrap();
    assert!(child.status.success(), "{model}: {}", String::from_utf8_lossy(&child.stderr));
}

fn attribute(number: i32) -> i32 {
    let mut value = -1;
    ok!(cuDeviceGetAttribute(&raw mut value, number, 0));
    value
}

fn load(text: &str) -> (u32, u64) {
    let source = crate::support::text(text);
    let mut module = 0;
    (cu!(cuModuleLoadData(&raw mut module, source.as_ptr().cast())), module)
}

fn empty(target: &str) -> String {
    format!(".version 9.0\n.target sm_{target}\n.address_size 64\n.visible .entry k() {{ ret; }}\n")
}

// Promise: S62
#[test]
fn attributes_names_and_limits_of_a_model_belong_together() {
    for model in ["T4-16", "A100-80", "A10-24", "L4-24", "H200-141", "RTX5090-32"] {
        on(model, "limits_in_own_process");
    }
}

#[test]
#[ignore = "a part of attributes_names_and_limits_of_a_model_belong_together"]
fn limits_in_own_process() {
    init();
    // The vendor's tables: capability, threads and blocks of a multiprocessor, shared memory of a multiprocessor and of a block
    // that opts in, in KiB, the memory reserved in a block, single to double precision, and the name.
    let (major, minor, threads, blocks, shared, most, reserved, ratio, name) = match role().as_str() {
        "T4-16" => (7, 5, 1024, 16, 64, 64, 0, 32, "Tesla T4"),
        "A100-80" => (8, 0, 2048, 32, 164, 163, 1, 2, "NVIDIA A100-SXM4-80GB"),
        "A10-24" => (8, 6, 1536, 16, 100, 99, 1, 64, "NVIDIA A10"),
        "L4-24" => (8, 9, 1536, 24, 100, 99, 1, 64, "NVIDIA L4"),
        "H200-141" => (9, 0, 2048, 32, 228, 227, 1, 2, "NVIDIA H200"),
        "RTX5090-32" => (12, 0, 1536, 24, 100, 99, 1, 64, "NVIDIA GeForce RTX 5090"),
        other => panic!("{other}"),
    };
    assert_eq!([attribute(75), attribute(76)], [major, minor]);
    let (mut first, mut second) = (0, 0);
    ok!(cuDeviceComputeCapability(&raw mut first, &raw mut second, 0));
    assert_eq!([first, second], [major, minor]);
    assert_eq!([attribute(39), attribute(106)], [threads, blocks]);
    assert_eq!([attribute(81), attribute(97), attribute(111)], [shared << 10, most << 10, reserved << 10]);
    assert_eq!([attribute(12), attribute(82), attribute(87)], [65_536, 65_536, ratio]);
    let mut text = [0; 64];
    ok!(cuDeviceGetName(text.as_mut_ptr(), 64, 0));
    let text: Vec<u8> = text.iter().map(|c| c.cast_unsigned()).take_while(|c| *c != 0).collect();
    assert_eq!(String::from_utf8(text).unwrap(), name);
    // Clusters, tensor maps and multicast are reported by no model: the engine executes none.
    assert_eq!([attribute(120), attribute(127), attribute(132)], [0, 0, 0]);
    let _context = Context::new();
    let sm = major * 10 + minor;
    for (target, device) in
        [("75", 75), ("80", 80), ("86", 86), ("89", 89), ("90", 90), ("100", 100), ("120", 120)]
    {
        let (code, module) = load(&empty(target));
        assert_eq!(code, if device <= sm { 0 } else { NO_BINARY }, "sm_{target} on sm_{sm}");
        if code == 0 {
            let kernel = function(module, "k");
            let mut value = 0;
            ok!(cuFuncGetAttribute(&raw mut value, 5, kernel));
            assert_eq!(value, device, "the version of the PTX");
            ok!(cuFuncGetAttribute(&raw mut value, 6, kernel));
            assert_eq!(value, sm, "the version of the code");
            // A block opts in to as much shared memory as the device reports.
            ok!(cuFuncSetAttribute(kernel, 8, most << 10));
            assert_eq!(cu!(cuFuncSetAttribute(kernel, 8, (most << 10) + 1)), INVALID_VALUE);
            let bytes = u32::try_from(most << 10).unwrap();
            ok!(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, bytes, 0, ptr::null_mut(), ptr::null_mut()));
            let mut resident = 0;
            ok!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut resident, kernel, 32, 0));
            assert_eq!(resident, blocks);
        }
    }
    for (target, device) in [("90a", 90), ("100a", 100), ("120a", 120), ("120f", 120)] {
        let (code, _) = load(&empty(target));
        assert_eq!(code, if device == sm { 0 } else { NO_BINARY }, "sm_{target} on sm_{sm}");
    }
    // The text's own target decides which instructions it has.
    let old = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { .reg .b32 %r<2>; .shared .b32 s;\n\
               redux.sync.add.s32 %r1, 1, -1; ret; }\n";
    assert_eq!(load(old).0, INVALID_PTX);
    ok!(cuCtxSynchronize());
}

// Promise: S63
#[test]
fn function_that_cannot_run_is_refused_at_its_lookup() {
    on("H200-141", "lookup_in_own_process");
}

#[test]
#[ignore = "a part of function_that_cannot_run_is_refused_at_its_lookup"]
fn lookup_in_own_process() {
    let _context = Context::new();
    let source = text(
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry good() { ret; }\n\
         .visible .entry bad() { wgmma.fence.sync.aligned; ret; }\n",
    );
    let mut module = 0;
    ok!(cuModuleLoadData(&raw mut module, source.as_ptr().cast()));
    assert_eq!(launch(function(module, "good"), 1, 1, 0, &mut []), 0);
    let mut place = 7;
    assert_eq!(cu!(cuModuleGetFunction(&raw mut place, module, c"bad".as_ptr())), NOT_SUPPORTED);
    assert_eq!(place, 7);
    assert_eq!(cu!(cuModuleGetFunction(&raw mut place, module, c"none".as_ptr())), NOT_FOUND);
    // It is a part of its module, and is refused at its launch, too.
    let mut functions = [0; 2];
    ok!(cuModuleEnumerateFunctions(functions.as_mut_ptr(), 2, module));
    assert_eq!(launch(functions[1], 1, 1, 0, &mut []), NOT_SUPPORTED);
    ok!(cuCtxSynchronize());
}
