//! The parser from PTX text to a syntax tree. Total on any input: no panic, no recursion that the input controls.

mod lex;
mod parse;
mod tree;

pub(crate) use parse::parse;
pub(crate) use tree::{Function, Init, Instruction, Operand, Prototype, Space, Statement, Ty, Variable};
