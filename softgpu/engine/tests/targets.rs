//! The language that a text states: which instructions it has, and which devices it is for.

use softgpu_engine::{LoadErrorKind, Module};

/// A text with one instruction.
fn text(isa: u32, target: &str, instruction: &str) -> String {
    let wide = if instruction.contains("%o") { ".reg .b128 %o<4>;" } else { "" };
    format!(
        ".version {}.{}\n.target sm_{target}\n.address_size 64\n.visible .entry k(.param .u64 a)\n{{ .reg .b8 %q<4>; \
         .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<9>; .reg .f32 %f<20>; .reg .f64 %e<9>; .reg .pred %p<5>; {wide}\n\
         .shared .align 128 .b8 sh[1024]; .shared .align 8 .b64 bar;\n{instruction}\nret; }}\n",
        isa / 10,
        isa % 10
    )
}

/// The reason for which a device of the newest generation refuses the text as invalid.
fn invalid(isa: u32, target: &str, instruction: &str) -> Option<String> {
    let device = if target.ends_with('a') { target.trim_end_matches('a').parse().unwrap() } else { 120 };
    match Module::load(text(isa, target, instruction).as_bytes(), device) {
        Ok(_) => None,
        Err(error) => {
            assert_eq!((error.kind, error.line), (LoadErrorKind::Syntax, 7), "{instruction}: {error}");
            Some(error.message)
        }
    }
}

// Promise: S63
#[test]
fn instruction_needs_the_architecture_and_the_version_that_the_vendors_assembler_needs() {
    const TARGETS: [&str; 10] = ["75", "80", "86", "89", "90", "90a", "100", "100a", "120", "120a"];
    let rows = include_str!("data/targets.txt").lines().filter(|line| !line.starts_with('#'));
    let mut count = 0;
    for row in rows {
        let [target, isa, instruction] = row.splitn(3, ' ').collect::<Vec<_>>().try_into().expect(row);
        let isa: u32 = isa.parse().expect(row);
        assert_eq!(invalid(isa, target, instruction), None, "{row}");
        let at = TARGETS.iter().position(|name| *name == target).expect(row);
        for lower in TARGETS[..at].iter().filter(|name| !name.ends_with('a') || target.ends_with('a')) {
            let why = invalid(95, lower, instruction).unwrap_or_else(|| panic!("{row}: loads for {lower}"));
            assert!(why.contains(&format!("needs .target sm_{target}")), "{row}: {why}");
        }
        // The oldest version of each architecture has no instruction that a later one added.
        let older = isa - if isa.is_multiple_of(10) { 2 } else { 1 };
        if older >= 63 {
            let why =
                invalid(older, target, instruction).unwrap_or_else(|| panic!("{row}: loads at {older}"));
            assert!(why.contains(&format!("needs .version {}.{}", isa / 10, isa % 10)), "{row}: {why}");
        }
        count += 1;
    }
    assert!(count > 200, "{count} rows");
}

// Promise: S63
#[test]
fn text_for_one_architecture_or_family_loads_on_no_other() {
    let loads = |target: &str, device: u32| Module::load(text(95, target, "").as_bytes(), device).map(drop);
    for (target, device, expected) in [
        ("75", 120, true),
        ("90", 90, true),
        ("90", 80, false),
        ("90a", 90, true),
        ("90a", 120, false),
        ("90a", 80, false),
        ("120a", 120, true),
        ("120a", 90, false),
        ("120f", 120, true),
        ("120f", 121, true),
        ("121f", 120, false),
        ("100f", 120, false),
    ] {
        match loads(target, device) {
            Ok(()) => assert!(expected, "sm_{target} on {device}"),
            Err(error) => {
                assert!(!expected, "sm_{target} on {device}: {error}");
                assert_eq!((error.kind, error.line), (LoadErrorKind::Target, 2), "{error}");
            }
        }
    }
    assert_eq!(loads("9x", 90).unwrap_err().kind, LoadErrorKind::Syntax);
}

// Promise: S63
#[test]
fn kernel_that_cannot_run_is_refused_alone() {
    let module = Module::load(
        b".version 8.7\n.target sm_90a\n.address_size 64\n\
          .visible .entry good() { ret; }\n\
          .visible .entry bad() {\nwgmma.fence.sync.aligned;\nret; }\n\
          .func deep() { wgmma.fence.sync.aligned;\nret; }\n\
          .func shallow() { call.uni deep; ret; }\n\
          .visible .entry caller(.param .u32 a) { call.uni shallow;\nret; }\n\
          .visible .entry cluster() .reqnctapercluster 2, 1, 1 .maxntid 32 { ret; }\n\
          .visible .entry multimem() { .reg .b64 %d<2>; .reg .b32 %r; multimem.red.relaxed.sys.global.add.u32 [%d0], %r; ret; }\n\
          .visible .entry tensor() { .reg .b64 %d<2>; .reg .b32 %r; cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%d0, {%r}]; ret; }\n\
          .visible .entry mapa() { .reg .b64 %d<2>; .reg .b32 %r; mapa.u64 %d0, %d1, %r; ret; }\n\
          .visible .entry barrier() { barrier.cluster.arrive.aligned; ret; }\n\
          .visible .entry tensormap() { .reg .b64 %d<2>; tensormap.replace.tile.global_address.global.b1024.b64 [%d0], %d1; ret; }\n",
        90,
    )
    .expect("loads");
    let refusal = |name: &str| {
        let kernel = module.kernels().iter().find(|kernel| kernel.name == name).expect(name);
        kernel.refusal.as_ref().map(|error| (error.kind, error.line, error.message.clone()))
    };
    assert_eq!(refusal("good"), None);
    let (kind, line, message) = refusal("bad").expect("refused");
    assert_eq!((kind, line), (LoadErrorKind::Unsupported, 6));
    assert!(message.contains("wgmma.fence.sync.aligned"), "{message}");
    let (_, line, message) = refusal("caller").expect("refused");
    assert_eq!(line, 11);
    assert!(message.contains("calls shallow") && message.contains("line 8: instruction wgmma"), "{message}");
    assert!(refusal("cluster").expect("refused").2.contains("reqnctapercluster"));
    for name in ["multimem", "tensor", "mapa", "barrier", "tensormap"] {
        assert_eq!(refusal(name).map(|(kind, ..)| kind), Some(LoadErrorKind::Unsupported), "{name}");
    }
    let cluster = module.kernels().iter().find(|kernel| kernel.name == "cluster").expect("listed");
    assert_eq!(cluster.max_threads, 32);
    // Text that is invalid refuses its module, whatever else is refused.
    let text = b".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry bad() { wgmma.fence.sync.aligned; ret; }\n\
                 .visible .entry wrong() { frobnicate; }\n";
    assert_eq!(Module::load(text, 90).err().expect("refused").kind, LoadErrorKind::Syntax);
}
