//! PTX parser and warp-wide interpreter.
