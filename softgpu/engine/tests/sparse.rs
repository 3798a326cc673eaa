//! Products with a sparse matrix: every shape and type against sums over the whole matrix, in f64 or integers.
//!
//! The reference goes the other way than the engine: it begins with a whole matrix half of whose elements are not stored, and fills the
//! registers of each lane from the tables of the language.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "codes are made by casts"
)]

use softgpu_engine::Module;

use crate::common::{Buffer, Params, Rig, shape};

/// An element type: its name, and the code of a whole number.
#[derive(Clone, Copy)]
struct Element {
    name: &'static str,
    bits: usize,
    least: i64,
    greatest: i64,
    code: fn(i64) -> u32,
}

/// The bits of a small whole number as a floating-point number of an exponent and a mantissa.
fn float(x: i64, exponent: u32, mantissa: u32) -> u32 {
    let sign = u32::from(x < 0) << (exponent + mantissa);
    let magnitude = x.unsigned_abs();
    let Some(power) = magnitude.checked_ilog2() else { return 0 };
    let bias = (1 << (exponent - 1)) - 1;
    let fraction = ((magnitude - (1 << power)) << mantissa >> power) as u32;
    sign | (power + bias) << mantissa | fraction
}

const F16: Element = Element { name: "f16", bits: 16, least: -7, greatest: 7, code: |x| float(x, 5, 10) };
const BF16: Element = Element { name: "bf16", bits: 16, least: -99, greatest: 99, code: |x| float(x, 8, 7) };
const TF32: Element = Element { name: "tf32", bits: 32, least: -99, greatest: 99, code: |x| float(x, 8, 23) };
const S8: Element = Element { name: "s8", bits: 8, least: -128, greatest: 127, code: |x| x as u32 & 0xff };
const U8: Element = Element { name: "u8", bits: 8, least: 0, greatest: 255, code: |x| x as u32 };
const S4: Element = Element { name: "s4", bits: 4, least: -8, greatest: 7, code: |x| x as u32 & 0xf };
const U4: Element = Element { name: "u4", bits: 4, least: 0, greatest: 15, code: |x| x as u32 };
const E4M3: Element = Element { name: "e4m3", bits: 8, least: -8, greatest: 8, code: |x| float(x, 4, 3) };
const E5M2: Element = Element { name: "e5m2", bits: 8, least: -4, greatest: 4, code: |x| float(x, 5, 2) };

/// Numbers without a pattern.
struct Noise(u64);

impl Noise {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % count
    }

    fn element(&mut self, of: Element) -> i64 {
        of.least + self.below((of.greatest - of.least + 1) as usize) as i64
    }
}

/// A row of a sparse matrix: its chunks with four bits of metadata each, and its stored elements in their order, with their columns.
struct Row {
    metadata: Vec<u32>,
    stored: Vec<(usize, i64)>,
}

/// Chooses the stored elements of a row. The language defines the chunks by the type.
fn row(noise: &mut Noise, of: Element, k: usize, ordered: bool) -> Row {
    let mut row = Row { metadata: Vec::new(), stored: Vec::new() };
    if of.bits == 32 {
        // One of two elements.
        for chunk in 0..k / 2 {
            let second = noise.below(2);
            row.metadata.push([0b0100, 0b1110][second]);
            row.stored.push((chunk * 2 + second, noise.element(of)));
        }
        return row;
    }
    // Two of four elements, or two pairs of four pairs of elements.
    let pair = if of.bits == 4 { 2 } else { 1 };
    for chunk in 0..k / (4 * pair) {
        let first = noise.below(4);
        let second = (first + 1 + noise.below(3)) % 4;
        let [low, high] = if ordered { [first.min(second), first.max(second)] } else { [first, second] };
        row.metadata.push((low | high << 2) as u32);
        for at in [low, high] {
            for n in 0..pair {
                row.stored.push(((chunk * 4 + at) * pair + n, noise.element(of)));
            }
        }
    }
    row
}

/// The thread of a group of four that holds the metadata of a chunk of a row, and the lowest bit.
fn place(of: Element, k: usize, selector: usize, row: usize, chunk: usize) -> (usize, usize) {
    let lower = row / 8;
    match (of.bits, k) {
        // One thread, with columns 0 to 15 (tf32: 7) of the upper row in its low half, of the lower row in its high half.
        (16, 16) | (32, 8) => (selector, lower * 16 + chunk * 4),
        // Two threads: the second has the other half of the columns.
        (16, 32) | (32, 16) => (selector * 2 + chunk / 4, lower * 16 + chunk % 4 * 4),
        // Two threads: the first has the upper row, the second the lower one.
        (8, 32) | (4, 64) => (selector * 2 + lower, chunk * 4),
        // Four threads: two with the left half of the columns, two with the right one.
        (8, 64) | (4, 128) => (chunk / 8 * 2 + lower, chunk % 8 * 4),
        _ => unreachable!("no such shape"),
    }
}

/// One form of the instruction.
struct Form {
    k: usize,
    a: Element,
    b: Element,
    sum: &'static str,
    target: &'static str,
    selectors: usize,
    saturating: bool,
}

/// The text of a kernel that loads 16 words for each lane: four each of A, B, C, and the metadata.
fn text(form: &Form, variant: &str, selector: usize) -> String {
    let Form { k, a, b, sum, target, saturating, .. } = form;
    let list = |first: usize, count: usize| {
        (first..first + count).map(|n| format!("%r{n}")).collect::<Vec<_>>().join(", ")
    };
    let words = k * a.bits / 128;
    let sums = if *sum == "f16" { 2 } else { 4 };
    let saturate = if *saturating { ".satfinite" } else { "" };
    format!(
        ".version 9.0\n.target sm_{target}\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .b64 %in, %out, %at; .reg .b32 %r<24>, %id;\n\
         ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %id, %tid.x;\n\
         mul.wide.u32 %at, %id, 64; add.u64 %in, %in, %at; mul.wide.u32 %at, %id, 16; add.u64 %out, %out, %at;\n\
         ld.global.v4.b32 {{{}}}, [%in]; ld.global.v4.b32 {{{}}}, [%in+16]; ld.global.v4.b32 {{{}}}, [%in+32]; ld.global.b32 %r12, [%in+48];\n\
         mov.b32 %r16, 0; mov.b32 %r17, 0; mov.b32 %r18, 0; mov.b32 %r19, 0;\n\
         mma.{variant}.sync.aligned.m16n8k{k}.row.col{saturate}.{sum}.{}.{}.{sum} {{{}}}, {{{}}}, {{{}}}, {{{}}}, %r12, {selector};\n\
         st.global.v4.b32 [%out], {{{}}}; ret;\n}}\n",
        list(0, 4),
        list(4, 4),
        list(8, 4),
        a.name,
        b.name,
        list(16, sums),
        list(0, words),
        list(4, words),
        list(8, sums),
        list(16, 4),
    )
}

fn check(form: &Form, variant: &str, selector: usize, noise: &mut Noise) {
    let &Form { k, a, b, sum, saturating, .. } = form;
    let ordered = variant != "sp";
    let rows: Vec<Row> = (0..16).map(|_| row(noise, a, k, ordered)).collect();
    let matrix_b: Vec<[i64; 8]> = (0..k).map(|_| [0; 8].map(|_: i64| noise.element(b))).collect();
    let near_end = if saturating { i64::from(i32::MAX) - 100 } else { 0 };
    let addend = |noise: &mut Noise| {
        let sign = if noise.below(2) == 0 { 1 } else { -1 };
        sign * near_end + noise.below(200) as i64 - 100
    };
    let matrix_c: Vec<[i64; 8]> = (0..16).map(|_| [0; 8].map(|_: i64| addend(noise))).collect();
    let sum_code = |x: i64| match sum {
        "s32" => x as u32,
        "f16" => float(x, 5, 10),
        _ => float(x, 8, 23),
    };
    let (per_a, per_b) = (32 / a.bits, 32 / b.bits);
    let mut input = vec![0_u32; 32 * 16];
    for (lane, words) in input.chunks_mut(16).enumerate() {
        let (group, thread) = (lane / 4, lane % 4);
        for word in 0..4 {
            // A register of A has the stored elements of consecutive columns.
            let (row, first) = (group + word % 2 * 8, thread * per_a + word / 2 * 4 * per_a);
            for (n, (_, value)) in rows[row].stored.iter().skip(first).take(per_a).enumerate() {
                words[word] |= (a.code)(*value) << (n * a.bits);
            }
            for n in 0..per_b {
                if let Some(row) = matrix_b.get(thread * per_b + n + word * 4 * per_b) {
                    words[4 + word] |= (b.code)(row[group]) << (n * b.bits);
                }
            }
            let (row, column) = (group + word / 2 * 8, thread * 2 + word % 2);
            let code = sum_code(matrix_c[row][column]);
            if sum == "f16" {
                words[8 + word / 2] |= code << (word % 2 * 16);
            } else {
                words[8 + word] = code;
            }
        }
        // The other threads' words must not matter.
        words[12] = noise.below(1 << 31) as u32;
    }
    for (number, row) in rows.iter().enumerate() {
        for (chunk, code) in row.metadata.iter().enumerate() {
            let (thread, bit) = place(a, k, selector, number, chunk);
            let word = &mut input[(number % 8 * 4 + thread) * 16 + 12];
            *word = *word & !(15 << bit) | code << bit;
        }
    }
    let mut rig = Rig::new(&text(form, variant, selector));
    let (from, to) = (Buffer::of(&input), Buffer::zeroed(32 * 16));
    rig.map(&[&from, &to]);
    rig.run("k", shape(1, 32), Params::new().buf(&from).buf(&to));
    let output = to.all::<u32>();
    for (lane, words) in output.chunks(4).enumerate() {
        for n in 0..4 {
            let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
            let mut whole = vec![0; k];
            rows[row].stored.iter().for_each(|(at, value)| whole[*at] = *value);
            let products: i64 = whole.iter().zip(&matrix_b).map(|(x, y)| x * y[column]).sum();
            let mut expected = products + matrix_c[row][column];
            if saturating {
                expected = expected.clamp(i32::MIN.into(), i32::MAX.into());
            }
            let got = if sum == "f16" { words[n / 2] >> (n % 2 * 16) & 0xffff } else { words[n] };
            assert_eq!(
                got,
                sum_code(expected),
                "{variant} k{k} {} {} {sum} selector {selector}: lane {lane}, element {n}, {expected}",
                a.name,
                b.name
            );
        }
    }
}

// Promise: S88
#[test]
fn sparse_products_are_those_of_the_whole_matrix() {
    let form = |k, a: Element, b: Element, sum, target, selectors| Form {
        k,
        a,
        b,
        sum,
        target,
        selectors,
        saturating: false,
    };
    let mut forms = vec![
        form(16, F16, F16, "f16", "80", 4),
        form(32, F16, F16, "f16", "80", 2),
        form(16, F16, F16, "f32", "80", 4),
        form(32, F16, F16, "f32", "80", 2),
        form(16, BF16, BF16, "f32", "80", 4),
        form(32, BF16, BF16, "f32", "80", 2),
        form(8, TF32, TF32, "f32", "80", 4),
        form(16, TF32, TF32, "f32", "80", 2),
    ];
    for (a, b) in [(S8, S8), (S8, U8), (U8, S8), (U8, U8)] {
        forms.extend([form(32, a, b, "s32", "80", 2), form(64, a, b, "s32", "80", 1)]);
    }
    for (a, b) in [(S4, S4), (S4, U4), (U4, S4), (U4, U4)] {
        forms.extend([form(64, a, b, "s32", "80", 2), form(128, a, b, "s32", "80", 1)]);
    }
    for (a, b) in [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)] {
        forms.push(form(64, a, b, "f32", "89", 1));
    }
    forms.extend(
        [(32, S8, U8, 2), (64, U8, S8, 1), (64, S4, S4, 2), (128, U4, S4, 1)]
            .map(|(k, a, b, selectors)| Form { saturating: true, ..form(k, a, b, "s32", "80", selectors) }),
    );
    let mut noise = Noise(0x1234_5678_9abc_def1);
    for form in &forms {
        for variant in ["sp", "sp::ordered_metadata"] {
            for selector in 0..form.selectors {
                check(form, variant, selector, &mut noise);
            }
        }
    }
}

// Promise: S88
#[test]
fn elements_that_are_not_stored_meet_no_infinity() {
    // Each lane stores elements 0 and 1 of each chunk; the rows of B for the other two are infinite.
    let mut rig = Rig::body(
        ".param .u64 out",
        ".reg .b64 %o, %a; .reg .b32 %r<9>, %id; .reg .f32 %f<9>; .reg .pred %p;\n\
         ld.param.u64 %o, [out]; mov.u32 %id, %tid.x; mul.wide.u32 %a, %id, 16; add.u64 %o, %o, %a;\n\
         mov.b32 %r0, 0x3c003c00; mov.b32 %r1, 0x44444444; and.b32 %r2, %id, 1; setp.eq.u32 %p, %r2, 1;\n\
         selp.b32 %r3, 0x7c007c00, 0x3c003c00, %p; mov.f32 %f1, 0f00000000;\n\
         mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r0, %r0}, {%r3, %r3}, {%f1, %f1, %f1, %f1}, %r1, 0;\n\
         st.global.v4.f32 [%o], {%f2, %f3, %f4, %f5}; ret;",
    );
    let out = Buffer::zeroed(32 * 16);
    rig.map(&[&out]);
    rig.run("k", shape(1, 32), Params::new().buf(&out));
    assert_eq!(out.all::<f32>(), [8.0; 128]);
}

// Promise: S88
#[test]
fn forms_that_the_vendors_assembler_refuses_are_refused() {
    let body = |shape: &str, types: &str, rest: &str| {
        format!(
            ".version 9.0\n.target sm_89\n.address_size 64\n.visible .entry k()\n{{\n.reg .b32 %r<24>; .reg .b64 %q; .reg .b16 %h;\n\
             mma.sp.sync.aligned.{shape}.row.col.{types} {rest};\nret;\n}}\n"
        )
    };
    let small = "{%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7}, {%r0, %r1, %r2, %r3}";
    let large = "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9, %r10, %r11}, {%r0, %r1, %r2, %r3}";
    let runs = |module: Module| module.kernels().iter().all(|kernel| kernel.refusal.is_none());
    let accepted = |text: &str| Module::load(text.as_bytes(), 89).is_ok_and(runs);
    for (shape, types, fragments, rest, valid) in [
        ("m16n8k16", "f32.f16.f16.f32", small, ", %r9, 3", true),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %r9, 4", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %r9, -1", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %r9, %r8", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", 5, 0", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %q, 0", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %h, 0", false),
        ("m16n8k16", "f32.f16.f16.f32", small, ", %r9", false),
        ("m16n8k16", "f32.f16.f16.f32", small, "", false),
        ("m16n8k16", "satfinite.f32.f16.f16.f32", small, ", %r9, 0", false),
        ("m16n8k16", "f32.tf32.tf32.f32", large, ", %r12, 1", true),
        ("m16n8k16", "f32.tf32.tf32.f32", large, ", %r12, 2", false),
        ("m16n8k32", "s32.s8.u8.s32", small, ", %r9, 1", true),
        ("m16n8k32", "s32.s8.u8.s32", small, ", %r9, 2", false),
        ("m16n8k64", "s32.s8.u8.s32", large, ", %r12, 0", true),
        ("m16n8k64", "s32.s8.u8.s32", large, ", %r12, 1", false),
        ("m16n8k64", "s32.s8.s4.s32", large, ", %r12, 0", false),
        ("m16n8k64", "f32.e4m3.e5m2.f32", large, ", %r12, 0", true),
        ("m16n8k32", "f32.e4m3.e5m2.f32", small, ", %r9, 0", false),
        ("m16n8k64", "f32.f16.f16.f32", large, ", %r12, 0", false),
    ] {
        let text = body(shape, types, &format!("{fragments}{rest}"));
        assert_eq!(accepted(&text), valid, "{shape} {types} {rest}");
    }
}
