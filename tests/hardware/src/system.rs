//! Memory of this process in unusual shapes, and a crash.

#![expect(unsafe_code, reason = "maps memory at chosen addresses, and crashes for a test")]

/// Ends the process by a signal, as a fault in the driver does.
pub(crate) fn crash() {
    // SAFETY: there is no memory at address 8; the fault is the purpose, and a test's only.
    unsafe { core::ptr::without_provenance_mut::<u32>(8).write_volatile(1) };
}
