//! The architecture and the version of the language that an instruction needs. A text states both: the compiler for hardware refuses
//! an instruction that they do not have, whichever device the text is loaded on.
//!
//! The rows were read from the answers of the vendor's assembler to one instruction of each kind, for each architecture from 7.5 on
//! and for each version of the language. An instruction without a row is in all of them.

use crate::ptx::{Instruction, Language, Operand};

/// What an instruction needs.
#[derive(Clone, Copy)]
struct Need {
    /// The least architecture, times ten.
    target: u32,
    letter: Letter,
    /// The least version of the language, times ten.
    isa: u32,
}

/// The letter after an architecture.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Letter {
    None,
    /// The architecture with a letter, or a later one with a letter.
    Some,
    /// One generation with a letter.
    Only,
}

const fn need(target: u32, isa: u32) -> Need {
    Need { target, letter: Letter::None, isa }
}

const fn lettered(target: u32, isa: u32) -> Need {
    Need { target, letter: Letter::Some, isa }
}

const fn only(target: u32, isa: u32) -> Need {
    Need { target, letter: Letter::Only, isa }
}

/// Modifiers that an instruction has together, and what it needs then.
type Row = (&'static [&'static str], Need);

const BRAIN: &[Row] = &[(&["bf16"], need(90, 78)), (&["bf16x2"], need(90, 78)), (&["f32x2"], need(100, 86))];

/// The rows of an opcode.
fn rows(opcode: &str) -> &'static [Row] {
    match opcode {
        "cp" => {
            const {
                &[
                    (&["async"], need(80, 70)),
                    (&["bulk"], need(90, 80)),
                    (&["bulk", "shared::cta", "global", "mbarrier::complete_tx::bytes"], need(90, 86)),
                ]
            }
        }
        "createpolicy" | "applypriority" | "discard" => const { &[(&[], need(80, 74))] },
        "prefetch" => {
            const {
                &[
                    (&["L2::evict_last"], need(80, 74)),
                    (&["L2::evict_normal"], need(80, 74)),
                    (&["tensormap"], need(90, 80)),
                ]
            }
        }
        "mbarrier" => {
            const {
                &[
                    (&[], need(80, 70)),
                    (&["parity"], need(80, 71)),
                    (&["shared::cta"], need(80, 78)),
                    (&["cta"], need(80, 80)),
                    (&["try_wait"], need(90, 78)),
                    (&["expect_tx"], need(90, 80)),
                    (&["complete_tx"], need(90, 80)),
                ]
            }
        }
        "redux" => const { &[(&[], need(80, 70)), (&["f32"], only(100, 86))] },
        "ldmatrix" => {
            const { &[(&[], need(75, 65)), (&["m16n16"], lettered(100, 86)), (&["m8n16"], lettered(100, 86))] }
        }
        "movmatrix" => const { &[(&[], need(75, 78))] },
        "stmatrix" => const { &[(&[], need(90, 78)), (&["m16n8"], lettered(100, 86))] },
        "elect" => const { &[(&[], need(90, 80))] },
        "griddepcontrol" | "mapa" | "getctarank" => const { &[(&[], need(90, 78))] },
        "setmaxnreg" => const { &[(&[], lettered(90, 80))] },
        "tensormap" => const { &[(&[], lettered(90, 83))] },
        "wgmma" => const { &[(&[], only(90, 80))] },
        "tcgen05" => const { &[(&[], only(100, 86))] },
        "multimem" => const { &[(&[], need(90, 81))] },
        "clusterlaunchcontrol" => const { &[(&[], need(100, 86))] },
        "tanh" | "ex2" => {
            const {
                &[
                    (&["bf16"], need(90, 78)),
                    (&["bf16x2"], need(90, 78)),
                    (&["f16"], need(75, 70)),
                    (&["f16x2"], need(75, 70)),
                ]
            }
        }
        "fma" => {
            const {
                &[
                    (&["bf16"], need(80, 70)),
                    (&["bf16x2"], need(80, 70)),
                    (&["relu"], need(80, 70)),
                    (&["oob"], need(90, 81)),
                    (&["f32", "f16"], need(100, 86)),
                    (&["f32", "bf16"], need(100, 86)),
                    (&["f32x2"], need(100, 86)),
                ]
            }
        }
        "add" => {
            const {
                &[
                    (&["bf16"], need(90, 78)),
                    (&["bf16x2"], need(90, 78)),
                    (&["u16x2"], need(90, 80)),
                    (&["s16x2"], need(90, 80)),
                    (&["f32x2"], need(100, 86)),
                    (&["f32", "f16"], need(100, 86)),
                    (&["f32", "bf16"], need(100, 86)),
                ]
            }
        }
        "sub" => {
            const {
                &[
                    (&["bf16"], need(90, 78)),
                    (&["bf16x2"], need(90, 78)),
                    (&["f32x2"], need(100, 86)),
                    (&["f32", "f16"], need(100, 86)),
                    (&["f32", "bf16"], need(100, 86)),
                ]
            }
        }
        "mul" | "setp" | "set" => BRAIN,
        "abs" | "neg" => const { &[(&["bf16"], need(80, 70)), (&["bf16x2"], need(80, 70))] },
        "min" | "max" => {
            const {
                &[
                    (&["f16"], need(80, 70)),
                    (&["f16x2"], need(80, 70)),
                    (&["bf16"], need(80, 70)),
                    (&["bf16x2"], need(80, 70)),
                    (&["NaN"], need(80, 70)),
                    (&["xorsign"], need(86, 72)),
                    (&["u16x2"], need(90, 80)),
                    (&["s16x2"], need(90, 80)),
                    (&["relu", "s32"], need(90, 80)),
                ]
            }
        }
        "atom" | "red" => {
            const {
                &[
                    (&["bf16"], need(90, 78)),
                    (&["bf16x2"], need(90, 78)),
                    (&["v2"], need(90, 81)),
                    (&["v4"], need(90, 81)),
                    (&["v8"], need(90, 81)),
                    (&["b128"], need(90, 83)),
                    (&["async"], need(90, 81)),
                ]
            }
        }
        "ld" | "st" => {
            const {
                &[
                    (&["v8"], need(100, 88)),
                    (&["v4", "b64"], need(100, 88)),
                    (&["v4", "u64"], need(100, 88)),
                    (&["v4", "s64"], need(100, 88)),
                    (&["v4", "f64"], need(100, 88)),
                    (&["b128"], need(75, 83)),
                    (&["async"], need(90, 81)),
                    (&["mmio"], need(75, 82)),
                ]
            }
        }
        "mov" => const { &[(&["b128"], need(75, 83))] },
        "bar" | "barrier" => const { &[(&["cta"], need(75, 78)), (&["cluster"], need(90, 78))] },
        "fence" => {
            const {
                &[
                    (&["async"], need(90, 80)),
                    (&["alias"], need(75, 75)),
                    (&["mbarrier_init"], need(90, 80)),
                    (&["acquire"], need(90, 86)),
                    (&["release"], need(90, 80)),
                ]
            }
        }
        "alloca" | "stacksave" | "stackrestore" => const { &[(&[], need(75, 73))] },
        "bmsk" | "szext" => const { &[(&[], need(75, 76))] },
        "lop3" => const { &[(&["or"], need(75, 82)), (&["and"], need(75, 82))] },
        "isspacep" => const { &[(&["param"], need(75, 77)), (&["param::entry"], need(75, 83))] },
        "wmma" => const { &[(&["bf16"], need(80, 70)), (&["tf32"], need(80, 70)), (&["f64"], need(80, 70))] },
        "mma" => {
            const {
                &[
                    (&["bf16"], need(80, 70)),
                    (&["tf32"], need(80, 70)),
                    (&["f64"], need(80, 70)),
                    (&["m8n8k4"], need(75, 64)),
                    (&["m16n8k8"], need(75, 65)),
                    (&["m8n8k16"], need(75, 65)),
                    (&["m8n8k32"], need(75, 65)),
                    (&["m8n8k128"], need(75, 70)),
                    (&["m16n8k16"], need(80, 70)),
                    (&["m16n8k32"], need(80, 70)),
                    (&["m16n8k64"], need(80, 70)),
                    (&["m16n8k128"], need(80, 70)),
                    (&["m16n8k256"], need(80, 70)),
                    (&["and"], need(80, 71)),
                    (&["m16n8k4", "f64"], need(90, 78)),
                    (&["m16n8k8", "f64"], need(90, 78)),
                    (&["m16n8k16", "f64"], need(90, 78)),
                    (&["sp"], need(80, 71)),
                    (&["sp::ordered_metadata"], need(80, 85)),
                    (&["e4m3"], need(89, 84)),
                    (&["e5m2"], need(89, 84)),
                    (&["e4m3", "m16n8k16"], need(89, 87)),
                    (&["e5m2", "m16n8k16"], need(89, 87)),
                    (&["e4m3", "f16"], need(89, 87)),
                    (&["e5m2", "f16"], need(89, 87)),
                    (&["kind::f8f6f4"], lettered(120, 87)),
                    (&["kind::mxf8f6f4"], lettered(120, 87)),
                    (&["kind::mxf4"], lettered(120, 87)),
                    (&["kind::mxf4nvf4"], lettered(120, 87)),
                ]
            }
        }
        _ => &[],
    }
}

/// What a modifier of any instruction needs.
fn of_any(word: &str) -> Option<Need> {
    match word {
        "cluster" | "shared::cluster" => Some(need(90, 78)),
        "L2::cache_hint" | "L2::256B" => Some(need(80, 74)),
        _ if word.starts_with("L1::") || word.starts_with("L2::") => Some(need(75, 74)),
        _ => None,
    }
}

/// What a conversion needs, by its two types.
fn conversion(inst: &Instruction<'_>) -> Option<Need> {
    let has = |word: &str| inst.modifiers.contains(&word);
    let small = ["e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2"];
    Some(if has("rs") {
        only(100, 87)
    } else if small.iter().any(|ty| has(ty)) {
        lettered(100, 86)
    } else if has("e4m3x2") || has("e5m2x2") {
        need(89, 81)
    } else if has("tf32") && has("rna") {
        if has("satfinite") { need(80, 81) } else { need(80, 70) }
    } else if has("tf32") {
        if has("satfinite") { need(100, 86) } else { need(90, 78) }
    } else if has("bf16") || has("bf16x2") {
        // To the longer type, or from it.
        let widens = inst.modifiers.last().is_some_and(|ty| ty.starts_with("bf16"));
        if has("f32") { need(80, if widens { 71 } else { 70 }) } else { need(90, 78) }
    } else if has("f16x2") || has("relu") {
        need(80, 70)
    } else if has("pack") {
        need(75, 65)
    } else {
        return None;
    })
}

/// Instructions that the engine does not execute, by the modifiers that they have together. Opcodes without any executed form are not
/// among them.
const NOT_EXECUTED: &[(&str, &[&str])] = &[
    ("cvt", &["rs"]),
    ("cvt", &["ue8m0x2"]),
    ("cp", &["reduce"]),
    ("cp", &["tensor"]),
    ("st", &["async"]),
    ("red", &["async"]),
];

/// True if the engine has code for an instruction of the language, or its opcode.
pub(super) fn is_executed(inst: &Instruction<'_>) -> bool {
    let is = |(opcode, words): &(&str, &[&str])| {
        *opcode == inst.opcode && words.iter().all(|word| inst.modifiers.contains(word))
    };
    !NOT_EXECUTED.iter().any(is)
}

/// Checks that the language of a text has an instruction. Returns the reason if not.
pub(super) fn check(language: Language, inst: &Instruction<'_>) -> Result<(), String> {
    let has = |words: &[&str]| words.iter().all(|word| inst.modifiers.contains(word));
    let rows = rows(inst.opcode).iter().filter(|(words, _)| has(words)).map(|(_, need)| *need);
    let special = match inst.opcode {
        "cvt" => conversion(inst),
        // A count of arrivals.
        "mbarrier" if has(&["arrive"]) && !has(&["noComplete"]) => {
            let counted =
                matches!(inst.operands.last(), Some(operand) if !matches!(operand, Operand::Memory { .. }));
            counted.then_some(need(90, 78))
        }
        "tanh" => Some(need(75, 70)),
        "abs" if has(&["f16"]) || has(&["f16x2"]) => Some(need(75, 65)),
        "min" | "max" if inst.operands.len() == 4 => Some(need(100, 88)),
        _ => None,
    };
    let words = inst.modifiers.iter().filter_map(|word| of_any(word));
    let needs: Vec<Need> = rows.chain(special).chain(words).collect();
    let Language { isa, target, suffix } = language;
    let fits = |need: &Need| match need.letter {
        Letter::None => target >= need.target,
        Letter::Some => target >= need.target && suffix.is_some(),
        Letter::Only => target >= need.target && suffix.is_some() && target / 10 == need.target / 10,
    };
    if let Some(need) = needs.iter().filter(|need| !fits(need)).max_by_key(|need| need.target) {
        let letter = if need.letter == Letter::None { "" } else { "a" };
        let more = if need.letter == Letter::Only { "" } else { " or higher" };
        return Err(format!("needs .target sm_{}{letter}{more}", need.target));
    }
    match needs.iter().map(|need| need.isa).max() {
        Some(least) if isa < least => Err(format!("needs .version {}.{} or higher", least / 10, least % 10)),
        _ => Ok(()),
    }
}
