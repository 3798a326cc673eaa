//! Whole-system tests: helpers shared by the test binaries.
