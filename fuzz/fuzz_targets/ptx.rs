//! The PTX parser and the lowering behind it: texts from a guest, which NULs separate, are linked or refused, and every module can be laid
//! out.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softgpu_engine::{Module, SourceUnit};

fuzz_target!(|texts: &[u8]| {
    let units: Vec<SourceUnit<'_>> =
        texts.splitn(4, |byte| *byte == 0).map(|text| SourceUnit { text, max_registers: None }).collect();
    let Ok(module) = Module::load_units(&units, 90) else { return };
    for (index, global) in module.globals().iter().enumerate() {
        // The driver allocates a variable's memory first, and refuses a guest that has too little of it there.
        if global.size <= 1 << 20 {
            let bytes = module.initial_bytes(index, &|other| 0x1000 * (other as u64 + 1));
            assert!(bytes.len() as u64 <= global.size, "more bytes than the variable has");
        }
    }
});
