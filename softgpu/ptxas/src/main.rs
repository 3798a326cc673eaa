//! `softgpu-ptxas`, which takes the place of the vendor's assembler for programs that call it: Triton, XLA and the like.
//!
//! It has the command line, the messages and the exit status of `ptxas`. It checks PTX with the engine's parser and writes a file
//! that the software GPU's driver loads, with the PTX in it. It never makes machine code.

mod assemble;
mod options;

use std::process::ExitCode;

use assemble::{assemble, fatal};
use options::AssemblerRequest;

/// The exit status of every failure.
const FAILURE: u8 = 255;

fn main() -> ExitCode {
    let words = std::env::args().skip(1).collect();
    let done = match AssemblerRequest::parse(words) {
        Ok(AssemblerRequest::Print(text)) => {
            print!("{text}");
            Ok(())
        }
        Ok(AssemblerRequest::Assemble(options)) => assemble(&options),
        Err(message) => Err(vec![fatal(&message)]),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(lines) => {
            lines.iter().for_each(|line| eprintln!("{line}"));
            ExitCode::from(FAILURE)
        }
    }
}
