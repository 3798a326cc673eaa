//! Runs the CUDA calls of one guest process on the real driver.
