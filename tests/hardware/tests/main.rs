//! Tests of the frame and a rehearsal on the software GPU.
