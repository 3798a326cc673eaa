//! The syntax tree: names are slices of the source, statements of a body are one flat list.

use crate::api::LoadError;
use crate::image::ReferenceKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

/// A scalar type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    Bf16,
    F16x2,
    Bf16x2,
    Tf32,
    F32,
    F64,
    U16x2,
    S16x2,
    S4,
    U4,
    B1,
    /// Floating-point numbers of 8 bits, which only products of matrices name as types.
    E4m3,
    E5m2,
}

impl Ty {
    /// Parses the type of a register or variable. Other types are those of instructions alone.
    pub(crate) fn declared(name: &str) -> Option<Ty> {
        use Ty::{B8, B16, B32, B64, B128, F16, F16x2, F32, F64, Pred, S8, S16, S32, S64, U8, U16, U32, U64};
        Ty::parse(name).filter(|ty| {
            matches!(ty, B8 | B16 | B32 | B64 | B128 | U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64)
                || matches!(ty, F16 | F16x2 | F32 | F64 | Pred)
        })
    }

    /// The type of a modifier.
    pub(crate) fn parse(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "b8" => Ty::B8,
            "b16" => Ty::B16,
            "b32" => Ty::B32,
            "b64" => Ty::B64,
            "b128" => Ty::B128,
            "u8" => Ty::U8,
            "u16" => Ty::U16,
            "u32" => Ty::U32,
            "u64" => Ty::U64,
            "s8" => Ty::S8,
            "s16" => Ty::S16,
            "s32" => Ty::S32,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "bf16" => Ty::Bf16,
            "f16x2" => Ty::F16x2,
            "bf16x2" => Ty::Bf16x2,
            "tf32" => Ty::Tf32,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            "u16x2" => Ty::U16x2,
            "s16x2" => Ty::S16x2,
            "s4" => Ty::S4,
            "u4" => Ty::U4,
            "b1" => Ty::B1,
            _ => return None,
        })
    }

    /// Size in bytes; predicates and sub-byte types count as one.
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Ty::Pred | Ty::B8 | Ty::U8 | Ty::S8 | Ty::S4 | Ty::U4 | Ty::B1 | Ty::E4m3 | Ty::E5m2 => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::B32
            | Ty::U32
            | Ty::S32
            | Ty::F32
            | Ty::F16x2
            | Ty::Bf16x2
            | Ty::Tf32
            | Ty::U16x2
            | Ty::S16x2 => 4,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 8,
            Ty::B128 => 16,
        }
    }

    /// True for a signed integer type.
    pub(crate) fn signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64 | Ty::S4)
    }

    /// True for a type of integers with or without a sign. Bits are no numbers.
    pub(crate) fn integer(self) -> bool {
        use Ty::{S8, S16, S16x2, S32, S64, U8, U16, U16x2, U32, U64};
        matches!(self, U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64 | U16x2 | S16x2)
    }

    /// True for a floating-point type, packed ones included.
    pub(crate) fn float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 | Ty::Tf32 | Ty::F32 | Ty::F64)
    }
}

/// One element of an initialiser.
#[derive(Clone, Debug)]
pub(crate) enum Init<'a> {
    Int(u64),
    F32(u32),
    F64(u64),
    /// The address of a symbol plus an offset; with a mask, one byte of that address.
    Symbol {
        name: &'a str,
        offset: i64,
        mask: Option<u64>,
    },
}

/// A variable or parameter.
#[derive(Clone, Debug)]
pub(crate) struct Variable<'a> {
    pub(crate) name: &'a str,
    pub(crate) space: Space,
    pub(crate) ty: Ty,
    pub(crate) align: u32,
    pub(crate) size: u64,
    /// Element index and value, for the initialised elements.
    pub(crate) init: Option<Vec<(u64, Init<'a>)>>,
    pub(crate) external: bool,
    pub(crate) visible: bool,
    /// `.weak` or `.common`: one of several definitions counts.
    pub(crate) weak: bool,
    pub(crate) managed: bool,
    /// True for a parameter in the register space.
    pub(crate) register: bool,
    pub(crate) line: u32,
}

/// A function declaration or definition.
#[derive(Clone, Debug)]
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    pub(crate) entry: bool,
    /// True if other units of a link may name it.
    pub(crate) visible: bool,
    /// `.weak`: one of several definitions counts.
    pub(crate) weak: bool,
    pub(crate) returns: Vec<Variable<'a>>,
    pub(crate) params: Vec<Variable<'a>>,
    pub(crate) body: Option<Vec<Statement<'a>>>,
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_block: Option<[u32; 3]>,
    /// `.maxnreg`.
    pub(crate) max_registers: Option<u32>,
    /// A directive of the function that the engine does not execute.
    pub(crate) refusal: Option<LoadError>,
    pub(crate) line: u32,
}

/// The shape of a call target that is only known at run time: sizes in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prototype {
    pub(crate) returns: Vec<u64>,
    pub(crate) params: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(crate) enum Statement<'a> {
    Open,
    Close,
    /// Registers: name, and a count for `%r<n>`.
    Registers {
        ty: Ty,
        /// Elements of each register.
        vector: u8,
        names: Vec<(&'a str, Option<u32>)>,
        line: u32,
    },
    Variable(Variable<'a>),
    Label(&'a str, u32),
    BranchTargets(&'a str, Vec<&'a str>),
    CallPrototype(&'a str, Prototype),
    Instruction(Instruction<'a>),
}

#[derive(Clone, Debug)]
pub(crate) struct Instruction<'a> {
    /// Guard predicate and whether it is negated.
    pub(crate) guard: Option<(&'a str, bool)>,
    pub(crate) opcode: &'a str,
    pub(crate) modifiers: Vec<&'a str>,
    pub(crate) operands: Vec<Operand<'a>>,
    pub(crate) line: u32,
}

#[derive(Clone, Debug)]
pub(crate) enum Operand<'a> {
    Name(&'a str),
    /// `%tid.x`, or a component of a vector register.
    Dotted(&'a str, &'a str),
    /// `!%p`.
    Not(&'a str),
    Int(u64),
    F32(u32),
    F64(u64),
    /// `symbol + n`.
    SymbolOffset(&'a str, i64),
    /// `{a, b}`.
    Vector(Vec<Operand<'a>>),
    /// `(a, b)` of a call.
    List(Vec<Operand<'a>>),
    /// `%p|%q`.
    Pair(&'a str, &'a str),
    /// `[base + n]`; without a name, an absolute address.
    Memory {
        base: Option<&'a str>,
        offset: i64,
    },
    /// `[base, {a, b}]` of textures and surfaces, with the operands after the name.
    Image {
        base: &'a str,
        operands: Vec<Operand<'a>>,
    },
    /// An element of a vector register; the lowering alone makes it.
    Register(u32, Ty),
    /// `{a, b}|%p`.
    Resident(Vec<Operand<'a>>, &'a str),
}

/// A module-scope `.texref` or `.surfref`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReferenceDeclaration<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: ReferenceKind,
    pub(crate) external: bool,
    pub(crate) visible: bool,
    pub(crate) weak: bool,
    pub(crate) line: u32,
}

/// The version of the language of a text, which decides the instructions that it may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Language {
    /// The version, times ten.
    pub(crate) isa: u32,
    /// The architecture of `.target`, times ten.
    pub(crate) target: u32,
    /// The letter after it: the text is for that architecture or its family alone.
    pub(crate) suffix: Option<char>,
}

/// A whole module.
#[derive(Clone, Debug)]
pub(crate) struct Tree<'a> {
    pub(crate) language: Language,
    pub(crate) variables: Vec<Variable<'a>>,
    pub(crate) functions: Vec<Function<'a>>,
    pub(crate) references: Vec<ReferenceDeclaration<'a>>,
    pub(crate) aliases: Vec<(&'a str, &'a str, u32)>,
}
