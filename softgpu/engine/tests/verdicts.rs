//! The validity of instructions: the verdicts of the vendor's assembler on one instruction each.

use softgpu_engine::Module;

/// A text with one instruction, among registers and variables of every kind.
fn text(instruction: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n.func (.param .b32 r) ext(.param .b32 p) {{ ret; }}\n\
         .global .align 16 .b8 g[256]; .const .align 16 .b8 cc[64]; .global .surfref sf; .global .texref tx;\n\
         .visible .entry k(.param .u64 kp, .param .u32 kq) {{\n\
         .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>; .reg .pred %p<9>; .reg .b8 %q<4>;\n\
         .reg .s32 %i<9>; .reg .u64 %u<9>; .reg .f16 %hf<9>; .reg .u16 %us<9>; .reg .f16x2 %hx<9>; .reg .b128 %o<4>;\n\
         .shared .align 16 .b8 sh[256]; .local .align 16 .b8 lo[64];\n{instruction}\n$L: ret;\n}}\n"
    )
}

// Promise: S89
#[test]
fn instruction_is_valid_if_the_vendors_assembler_takes_it() {
    let rows = include_str!("data/forms.txt").lines().filter(|line| !line.starts_with('#'));
    let mut wrong = Vec::new();
    let mut count = 0;
    for row in rows {
        let (verdict, instruction) = row.split_once(' ').expect(row);
        let accepted = match Module::load(text(instruction).as_bytes(), 80) {
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        if accepted.is_none() != (verdict == "+") {
            wrong.push(format!("{row}: {accepted:?}"));
        }
        count += 1;
    }
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 1000, "{count} rows");
}
