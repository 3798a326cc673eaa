//! Memory that another party changes at any time: raw copies, atomic words, scattered mappings, descriptor passing.
