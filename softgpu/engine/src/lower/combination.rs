//! Words and operands that exclude or require each other, whichever modifiers the opcode has.
//!
//! The rules were read from the answers of the vendor's assembler, as those of [`super::grammar`].

use crate::exec::Special;
use crate::ptx::{Instruction, Operand, Ty};

const SCOPES: &[&str] = &["cta", "gpu", "sys", "cluster"];
const ORDERS: &[&str] = &["relaxed", "acquire", "release", "acq_rel", "sc"];
const CACHED: &[&str] = &["ca", "cg", "cs", "lu", "cv", "wb", "wt"];
const SPACES: &[&str] = &["global", "shared", "shared::cta", "local", "const", "param"];
const ROUNDINGS: &[&str] = &["rn", "rz", "rm", "rp"];
const WHOLE_ROUNDINGS: &[&str] = &["rni", "rzi", "rmi", "rpi"];

/// The number of the group of a word. An instruction has at most one word of each group, once.
fn group(word: &str) -> Option<u32> {
    Some(match word {
        "v2" | "v4" | "v8" => 0,
        "rn" | "rz" | "rm" | "rp" | "rna" | "rni" | "rzi" | "rmi" | "rpi" => 1,
        "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" => 2,
        "cta" | "gpu" | "sys" | "cluster" | "gl" => 3,
        "clamp" | "trap" | "zero" | "wrap" => 4,
        "lo" | "hi" | "wide" => 5,
        "up" | "down" | "bfly" | "idx" => 6,
        "x1" | "x2" | "x4" => 7,
        "volatile" | "weak" | "relaxed" | "acquire" | "release" | "acq_rel" | "sc" => 8,
        "ftz" => 9,
        "nc" => 10,
        "aligned" => 11,
        "to" => 12,
        _ => return None,
    })
}

/// Checks an instruction. Returns the reason if its words or operands do not go together.
pub(super) fn check(inst: &Instruction<'_>) -> Result<(), String> {
    let words = || inst.modifiers.iter().copied();
    let has = |word: &str| inst.modifiers.contains(&word);
    let first_of = |list: &[&str]| words().find(|word| list.contains(word));
    let wrong = |word: &str| Err(format!("modifier .{word} is not valid here"));
    let mut groups = 0_u32;
    for word in words() {
        let bit = group(word).map_or(0, |group| 1 << group);
        if groups & bit != 0 {
            return Err(format!("modifier .{word} excludes another one"));
        }
        groups |= bit;
    }
    if let Some(word) = first_of(&["approx", "full"])
        && (first_of(ROUNDINGS).is_some() || has("approx") && has("full"))
    {
        return wrong(word);
    }
    match inst.opcode {
        "ld" | "st" => access(inst)?,
        "atom" | "red" => {
            let half = first_of(&["f16", "f16x2", "bf16", "bf16x2"]);
            if let Some(ty) = half.filter(|_| has("add") && !has("noftz")) {
                return Err(format!(".noftz is missing for .{ty}"));
            }
            if let Some(word) =
                first_of(&["exch", "cas", "acquire", "acq_rel"]).filter(|_| inst.opcode == "red")
            {
                return wrong(word);
            }
            if words().filter(|word| SPACES.contains(word)).count() > 1 {
                return Err("only one state space is possible".to_owned());
            }
        }
        "fence" if first_of(&["sc", "acq_rel"]).is_some() && first_of(SCOPES).is_none() => {
            return Err("a scope is missing".to_owned());
        }
        "bar" if has("cta") && inst.modifiers.first() != Some(&"cta") => return wrong("cta"),
        "membar" if !inst.operands.is_empty() => return Err("takes no operands".to_owned()),
        "suld" | "sust" | "sured" if first_of(&["x1", "x2", "x4"]).is_some() => {
            return Err("modifiers of matrices are not valid here".to_owned());
        }
        "suld" | "sust" | "sured" if first_of(&["clamp", "trap", "zero"]).is_none() => {
            return Err("one of .clamp .trap .zero is missing".to_owned());
        }
        "cvt" => conversion(inst)?,
        "setp" => comparison(inst, inst.modifiers.last())?,
        "set" => {
            comparison(inst, inst.modifiers.last())?;
            let narrow = words().rev().nth(1).is_some_and(|ty| matches!(ty, "u16" | "s16"));
            if narrow && !has("f16") && !has("bf16") {
                return Err("the result has 32 bits".to_owned());
            }
        }
        "mad" if has("sat") && has("lo") => return wrong("sat"),
        "add" | "sub" if has("sat") && (has("s64") || has("u64")) => return wrong("sat"),
        "dp4a" | "dp2a" if words().filter(|word| Ty::parse(word).is_some()).count() != 2 => {
            return Err("two types are expected".to_owned());
        }
        "mov" if first_of(&["v2", "v4"]).is_none() => {
            let vector = inst.operands.iter().any(|operand| matches!(operand, Operand::Vector(_)));
            if vector && first_of(&["b16", "b32", "b64", "b128"]).is_none() {
                return Err("only bits are taken apart".to_owned());
            }
        }
        "slct" if !matches!(inst.modifiers.last(), Some(&"s32" | &"f32")) => {
            return Err("the second type is .s32 or .f32".to_owned());
        }
        _ => {}
    }
    // The parser cannot tell these names from registers.
    if !matches!(inst.opcode, "mov" | "cvt" | "call") {
        let special = inst.operands.iter().find_map(|operand| match operand {
            Operand::Name(name) => Special::parse(name, "").map(|_| *name),
            Operand::Dotted(name, part) => Special::parse(name, part).map(|_| *name),
            _ => None,
        });
        if let Some(name) = special {
            return Err(format!("the special register {name} must be moved to a register first"));
        }
    }
    Ok(())
}

/// Loads and stores.
fn access(inst: &Instruction<'_>) -> Result<(), String> {
    let has = |word: &str| inst.modifiers.contains(&word);
    let first_of = |list: &[&str]| inst.modifiers.iter().copied().find(|word| list.contains(word));
    let load = inst.opcode == "ld";
    let order = first_of(ORDERS);
    let wrong = if load {
        first_of(&["release", "wb", "wt"])
    } else {
        first_of(&["acquire", "ca", "lu", "cv", "nc"])
    };
    let scope = first_of(SCOPES).filter(|_| order.is_none());
    let cached = first_of(CACHED).filter(|_| order.is_some() || has("volatile"));
    let local = order.filter(|_| has("local"));
    let read_only = order.or_else(|| has("volatile").then_some("volatile")).filter(|_| has("nc"));
    if let Some(word) = wrong.or(scope).or(cached).or(local).or(read_only) {
        return Err(format!("modifier .{word} is not valid here"));
    }
    if has("nc") && !has("global") {
        return Err(".nc needs .global".to_owned());
    }
    Ok(())
}

/// Comparisons: those of numbers without a sign have names of their own, and so have those that a NaN fulfils.
fn comparison(inst: &Instruction<'_>, ty: Option<&&str>) -> Result<(), String> {
    let Some(ty) = ty.and_then(|ty| Ty::parse(ty)) else { return Ok(()) };
    let fits = |word: &str| match word {
        "lt" | "le" | "gt" | "ge" => ty.float() || ty.integer(),
        "lo" | "ls" | "hi" | "hs" => ty.integer() && !ty.signed(),
        "equ" | "neu" | "ltu" | "leu" | "gtu" | "geu" | "num" | "nan" => ty.float(),
        _ => true,
    };
    match inst.modifiers.iter().find(|word| !fits(word)) {
        Some(word) => Err(format!("comparison .{word} is not defined for this type")),
        None => Ok(()),
    }
}

/// Conversions between integers and floats of 16 to 64 bits.
fn conversion(inst: &Instruction<'_>) -> Result<(), String> {
    let types: Vec<Ty> = inst.modifiers.iter().filter_map(|word| Ty::parse(word)).collect();
    let packed = |ty: &Ty| matches!(ty, Ty::Pred | Ty::U16x2 | Ty::S16x2);
    if types.iter().any(packed)
        || types.get(1) == Some(&Ty::F16x2) && types.first().is_some_and(|ty| ty.integer())
    {
        return Err("a type is not one of conversions".to_owned());
    }
    let simple = |ty: Ty| ty.integer() && ty.bytes() <= 8 || matches!(ty, Ty::F16 | Ty::F32 | Ty::F64);
    let &[to, from] = types.as_slice() else { return Ok(()) };
    let first_of = |list: &[&str]| inst.modifiers.iter().copied().find(|word| list.contains(word));
    let (plain, whole) = (first_of(ROUNDINGS), first_of(WHOLE_ROUNDINGS));
    let rounds = plain.is_some() || inst.modifiers.contains(&"rs");
    if matches!(to, Ty::Bf16 | Ty::Bf16x2 | Ty::F16x2) && from == Ty::F32 && !rounds {
        return Err("a rounding is missing".to_owned());
    }
    if !simple(to) || !simple(from) || inst.modifiers.contains(&"pack") {
        return Ok(());
    }
    let narrows = to.float() && (!from.float() || to.bytes() < from.bytes());
    let to_integer = !to.float() && from.float();
    if narrows && plain.is_none() || to_integer && whole.is_none() {
        return Err("a rounding is missing".to_owned());
    }
    let excess = plain.filter(|_| !narrows).or(whole.filter(|_| !to_integer && to != from));
    let holds_all = to.integer()
        && from.integer()
        && match (to.signed(), from.signed()) {
            (true, false) => to.bytes() > from.bytes(),
            (false, true) => false,
            _ => to.bytes() >= from.bytes(),
        };
    let sat = first_of(&["sat"]).filter(|_| holds_all);
    let ftz = first_of(&["ftz"]).filter(|_| to != Ty::F32 && from != Ty::F32);
    match excess.or(whole.filter(|_| !from.float())).or(sat).or(ftz) {
        Some(word) => Err(format!("modifier .{word} is not valid here")),
        None => Ok(()),
    }
}
