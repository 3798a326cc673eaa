//! The modifiers and types that an opcode may have. The lowering ignores a modifier that it does not ask for, so it cannot find one
//! that does not belong there.
//!
//! The rows were read from the answers of the vendor's assembler to one instruction with one more modifier. An opcode without a row
//! is checked by its lowering alone.

use super::combination;
use crate::ptx::{Instruction, Ty};

/// The modifiers of an instruction of these types.
struct GrammarRow {
    types: &'static [&'static str],
    words: &'static [&'static str],
    /// One of these must be there, unless the list is empty.
    one_of: &'static [&'static str],
}

const fn row(types: &'static [&'static str], words: &'static [&'static str]) -> GrammarRow {
    GrammarRow { types, words, one_of: &[] }
}

const fn rounded(
    types: &'static [&'static str],
    words: &'static [&'static str],
    one_of: &'static [&'static str],
) -> GrammarRow {
    GrammarRow { types, words, one_of }
}

const INTEGERS: &[&str] = &["u16", "s16", "u32", "s32", "u64", "s64"];
const SIGNED: &[&str] = &["s16", "s32", "s64"];
const WORDS: &[&str] = &["u32", "s32", "u64", "s64"];
const BITS: &[&str] = &["b16", "b32", "b64"];
const HALVES: &[&str] = &["f16", "f16x2"];
const BRAINS: &[&str] = &["bf16", "bf16x2"];
const PAIRS: &[&str] = &["u16x2", "s16x2"];
/// Types of registers that are copied.
const COPIED: &[&str] =
    &["b16", "b32", "b64", "b128", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64", "pred"];
const CHOSEN: &[&str] = &["b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"];
const ROUND: &[&str] = &["rn", "rz", "rm", "rp"];
const HALF: &[&str] = &["hi", "lo", "wide"];

/// The rows of an opcode; empty if its lowering alone checks it.
fn rows(opcode: &str) -> &'static [GrammarRow] {
    match opcode {
        "add" | "sub" => {
            const {
                &[
                    row(INTEGERS, &["sat", "cc"]),
                    row(PAIRS, &["sat"]),
                    row(&["f32"], &["rn", "rz", "rm", "rp", "ftz", "sat"]),
                    row(&["f64"], ROUND),
                    row(HALVES, &["rn", "ftz", "sat"]),
                    row(BRAINS, &["rn"]),
                ]
            }
        }
        "addc" | "subc" => const { &[row(WORDS, &["cc"])] },
        "mul" => {
            const {
                &[
                    rounded(INTEGERS, HALF, HALF),
                    row(&["f32"], &["rn", "rz", "rm", "rp", "ftz", "sat"]),
                    row(&["f64"], ROUND),
                    row(HALVES, &["rn", "ftz", "sat"]),
                    row(BRAINS, &["rn"]),
                ]
            }
        }
        "mad" => {
            const {
                &[
                    rounded(INTEGERS, &["hi", "lo", "wide", "sat", "cc"], HALF),
                    rounded(&["f32"], &["rn", "rz", "rm", "rp", "ftz", "sat"], ROUND),
                    rounded(&["f64"], ROUND, ROUND),
                ]
            }
        }
        "madc" => const { &[rounded(WORDS, &["hi", "lo", "cc"], HALF)] },
        "mul24" | "mad24" => const { &[rounded(&["u32", "s32"], &["hi", "lo", "sat"], HALF)] },
        "fma" => {
            const {
                &[
                    rounded(&["f32"], &["rn", "rz", "rm", "rp", "ftz", "sat"], ROUND),
                    rounded(&["f64"], ROUND, ROUND),
                    rounded(HALVES, &["rn", "ftz", "sat", "relu", "oob"], ROUND),
                    rounded(BRAINS, &["rn", "relu", "oob"], ROUND),
                ]
            }
        }
        "div" => {
            const {
                &[
                    row(INTEGERS, &[]),
                    rounded(
                        &["f32"],
                        &["approx", "full", "rn", "rz", "rm", "rp", "ftz"],
                        &["approx", "full", "rn", "rz", "rm", "rp"],
                    ),
                    rounded(&["f64"], ROUND, ROUND),
                ]
            }
        }
        "rem" => const { &[row(INTEGERS, &[])] },
        "and" | "or" | "xor" | "not" => const { &[row(BITS, &[]), row(&["pred"], &[])] },
        "cnot" | "shl" => const { &[row(BITS, &[])] },
        "shr" => const { &[row(BITS, &[]), row(INTEGERS, &[])] },
        "neg" | "abs" => {
            const {
                &[
                    row(SIGNED, &[]),
                    row(&["f32", "f16", "f16x2"], &["ftz"]),
                    row(&["f64", "bf16", "bf16x2"], &[]),
                ]
            }
        }
        "min" | "max" => {
            const {
                &[
                    row(INTEGERS, &["relu"]),
                    row(PAIRS, &["relu"]),
                    row(&["f32", "f16", "f16x2"], &["ftz", "NaN", "xorsign", "abs"]),
                    row(BRAINS, &["NaN", "xorsign", "abs"]),
                    row(&["f64"], &[]),
                ]
            }
        }
        "sqrt" | "rcp" => {
            const {
                &[
                    rounded(
                        &["f32"],
                        &["approx", "rn", "rz", "rm", "rp", "ftz"],
                        &["approx", "rn", "rz", "rm", "rp"],
                    ),
                    rounded(
                        &["f64"],
                        &["approx", "rn", "rz", "rm", "rp", "ftz"],
                        &["approx", "rn", "rz", "rm", "rp"],
                    ),
                ]
            }
        }
        "rsqrt" => const { &[rounded(&["f32", "f64"], &["approx", "ftz"], &["approx"])] },
        "lg2" | "sin" | "cos" => const { &[rounded(&["f32"], &["approx", "ftz"], &["approx"])] },
        "popc" | "clz" | "brev" => const { &[row(&["b32", "b64"], &[])] },
        "bfe" => const { &[row(WORDS, &[])] },
        "bfi" => const { &[row(&["b32", "b64"], &[])] },
        "bfind" => const { &[row(WORDS, &["shiftamt"])] },
        "sad" => const { &[row(INTEGERS, &[])] },
        "prmt" => const { &[row(&["b32"], &["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])] },
        "lop3" => const { &[row(&["b32"], &["or", "and"])] },
        "shf" => const { &[row(&["b32"], &["l", "r", "clamp", "wrap"])] },
        "dp4a" => const { &[row(&["u32", "s32"], &[])] },
        "dp2a" => const { &[rounded(&["u32", "s32"], &["lo", "hi"], &["lo", "hi"])] },
        "ex2" => {
            const {
                &[
                    rounded(&["f32", "bf16", "bf16x2"], &["approx", "ftz"], &["approx"]),
                    rounded(HALVES, &["approx"], &["approx"]),
                ]
            }
        }
        "tanh" => const { &[rounded(&["f32", "f16", "f16x2", "bf16", "bf16x2"], &["approx"], &["approx"])] },
        "selp" => const { &[row(CHOSEN, &[])] },
        "slct" => const { &[row(CHOSEN, &["ftz"])] },
        "copysign" => const { &[row(&["f32", "f64"], &[])] },
        "mov" => const { &[row(COPIED, &["v2", "v4"])] },
        _ => &[],
    }
}

/// Modifiers of arithmetic.
const ARITHMETIC: &[&str] = &[
    "rn",
    "rz",
    "rm",
    "rp",
    "rni",
    "rzi",
    "rmi",
    "rpi",
    "rna",
    "sat",
    "satfinite",
    "ftz",
    "cc",
    "hi",
    "lo",
    "wide",
    "approx",
    "full",
    "NaN",
    "relu",
    "xorsign",
    "abs",
    "oob",
    "shiftamt",
];
/// Modifiers of accesses to memory.
const ACCESS: &[&str] = &[
    "global", "shared", "local", "const", "param", "v2", "v4", "v8", "volatile", "relaxed", "acquire",
    "release", "acq_rel", "weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "noftz", "mmio", "cta",
    "gpu", "sys",
];
/// The types of instructions of control flow and between threads; none for those without a row.
fn control_types(inst: &Instruction<'_>) -> &'static [&'static [&'static str]] {
    let has = |word: &str| inst.modifiers.contains(&word);
    match inst.opcode {
        "shfl" | "activemask" => &[&["b32"]],
        "nanosleep" => &[&["u32"]],
        "match" => &[&["b32"], &["b64"]],
        "vote" if has("ballot") => &[&["b32"]],
        "vote" => &[&["pred"]],
        "bar" if has("popc") => &[&["u32"]],
        "bar" if has("red") => &[&["pred"]],
        _ => &[&[]],
    }
}
/// Types of values in memory.
const STORED: &[&str] =
    &["b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32", "f64"];

/// Checks the modifiers of an instruction. Returns the reason if one does not belong there, or if one is missing.
pub(super) fn check(inst: &Instruction<'_>) -> Result<(), String> {
    combination::check(inst)?;
    let words = || inst.modifiers.iter().copied();
    let wrong = |word: &str| Err(format!("modifier .{word} is not valid here"));
    let is_type = |word: &&str| Ty::parse(word).is_some();
    match inst.opcode {
        "ld" | "ldu" | "st" => {
            if let Some(word) = words().find(|word| ARITHMETIC.contains(word)) {
                return wrong(word);
            }
            if let Some(word) = words().find(|word| is_type(word) && !STORED.contains(word)) {
                return Err(format!(".{word} is not a type of memory"));
            }
            let spaces =
                words().filter(|word| ["global", "shared", "local", "const", "param"].contains(word));
            if spaces.count() > 1 {
                return Err("only one state space is possible".to_owned());
            }
            let has = |word: &str| words().any(|other| other == word);
            let ordered = words().find(|word| ["relaxed", "acquire", "release"].contains(word));
            if let Some(word) = ordered.or_else(|| words().find(|word| *word == "volatile"))
                && ["param", "const", "param::entry", "param::func"].into_iter().any(has)
            {
                return wrong(word);
            }
            if let Some(word) = ordered
                && !["cta", "gpu", "sys", "cluster"].into_iter().any(has)
            {
                return Err(format!(".{word} needs a scope"));
            }
        }
        "bra" | "brx" | "ret" | "exit" | "trap" | "shfl" | "vote" | "match" | "activemask" | "nanosleep"
        | "bar" | "membar" => {
            let is_level = |word: &str| match inst.opcode {
                "membar" => matches!(word, "cta" | "sys"),
                _ => inst.opcode == "bar" && word == "cta",
            };
            let is_wrong =
                |word: &&str| ARITHMETIC.contains(word) || ACCESS.contains(word) && !is_level(word);
            if let Some(word) = words().find(is_wrong) {
                return wrong(word);
            }
            if inst.opcode == "membar" && inst.modifiers.is_empty() {
                return Err("a level is missing".to_owned());
            }
            let types: Vec<&str> = words().filter(is_type).collect();
            if !control_types(inst).contains(&types.as_slice()) {
                return Err("the types are not those of this instruction".to_owned());
            }
        }
        "redux" => {
            let allowed = |word: &str| matches!(word, "NaN" | "abs");
            let is_wrong = |word: &&str| ARITHMETIC.contains(word) && !allowed(word) || ACCESS.contains(word);
            if let Some(word) = words().find(is_wrong) {
                return wrong(word);
            }
        }
        "setp" | "set" => {
            let allowed = |word: &str| matches!(word, "ftz" | "lo" | "hi");
            if let Some(word) =
                words().find(|word| ARITHMETIC.contains(word) && !allowed(word) || ACCESS.contains(word))
            {
                return wrong(word);
            }
        }
        "cvta" => {
            let is_space = |word: &str| {
                ["global", "const", "local", "param"].contains(&word)
                    || word.starts_with("shared")
                    || word.starts_with("param::")
            };
            if words().filter(|word| is_space(word)).count() != 1 {
                return Err("one state space is expected".to_owned());
            }
            let at = words().position(|word| word == "to");
            let is_wrong = |word: &&str| !is_space(word) && !matches!(*word, "to" | "u32" | "u64");
            if let Some(word) = words().find(is_wrong) {
                return wrong(word);
            }
            if at.is_some_and(|at| at != 0) {
                return wrong("to");
            }
        }
        "cp" if !words().any(|word| word == "async") => return Err("unknown instruction".to_owned()),
        "sust" | "suld" | "sured" | "tex" | "tld4" | "txq" | "suq" => {
            let allowed = ["v2", "v4", "ca", "cg", "cs", "cv", "wb", "wt"];
            let is_wrong =
                |word: &&str| ARITHMETIC.contains(word) || ACCESS.contains(word) && !allowed.contains(word);
            if let Some(word) = words().find(is_wrong) {
                return wrong(word);
            }
        }
        "atom" | "red" => {
            if let Some(word) =
                words().find(|word| matches!(*word, "b8" | "u8" | "s8" | "u16" | "s16" | "pred"))
            {
                return Err(format!(".{word} is not a type of this instruction"));
            }
            let wrong_word = |word: &&str| ARITHMETIC.contains(word) && *word != "rn";
            if let Some(word) = words().find(wrong_word) {
                return wrong(word);
            }
        }
        "cvt" => {
            let allowed = |word: &str| {
                word.starts_with('r') || matches!(word, "sat" | "satfinite" | "ftz" | "relu" | "oob")
            };
            if let Some(word) =
                words().find(|word| ARITHMETIC.contains(word) && !allowed(word) || ACCESS.contains(word))
            {
                return wrong(word);
            }
            let is_bits = |word: &&str| word.starts_with('b') && !word.starts_with("bf") && is_type(word);
            if let Some(word) = words().find(is_bits)
                && !words().any(|word| word == "pack")
            {
                return Err(format!(".{word} is not a type of conversions"));
            }
        }
        _ => {
            let rows = rows(inst.opcode);
            let Some(ty) = words().find(is_type).filter(|_| !rows.is_empty()) else { return Ok(()) };
            let Some(row) = rows.iter().find(|row| row.types.contains(&ty)) else {
                return Err(format!(".{ty} is not a type of this instruction"));
            };
            if let Some(word) = words().find(|word| !is_type(word) && !row.words.contains(word)) {
                return wrong(word);
            }
            if !row.one_of.is_empty() && !words().any(|word| row.one_of.contains(&word)) {
                return Err(format!("one of .{} is missing", row.one_of.join(" .")));
            }
        }
    }
    if words().any(|word| word == "ftz") && words().any(|word| is_type(&word)) {
        let flushed = |word: &str| {
            matches!(word, "f32" | "f16" | "f16x2" | "bf16" | "bf16x2")
                || word == "f64" && inst.opcode.starts_with('r')
        };
        if !words().any(flushed) {
            return wrong("ftz");
        }
    }
    Ok(())
}
