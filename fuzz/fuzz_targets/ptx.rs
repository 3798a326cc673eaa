//! The PTX parser and the lowering behind it: text from a guest loads or is refused, and every loaded module can be laid out.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softgpu_engine::Module;

fuzz_target!(|text: &[u8]| {
    let Ok(module) = Module::load(text, 90) else { return };
    for (index, global) in module.globals().iter().enumerate() {
        // The driver allocates a variable's memory first, and refuses a guest that has too little of it there.
        if global.size <= 1 << 20 {
            let bytes = module.initial_bytes(index, &|other| 0x1000 * (other as u64 + 1));
            assert!(bytes.len() as u64 <= global.size, "more bytes than the variable has");
        }
    }
});
