//! The parser from PTX text to a syntax tree.
//!
//! The load of a module calls it and lowers its result. It owns the tree, which borrows from the text. It is total on any input:
//! no panic, and no recursion that the input controls.

mod lex;
mod parse;
mod tree;

pub use parse::NEWEST_ISA;
pub(crate) use parse::parse;
pub(crate) use tree::{
    Function, Init, Instruction, Language, Operand, Prototype, ReferenceDeclaration, Space, Statement, Tree,
    Ty, Variable,
};
