//! The export tables of a process that has not connected them to a driver: present, but without function or harm.

#![expect(unsafe_code, reason = "a table is called as a C program calls it")]

use std::ffi::c_void;

use sluice_cuda_frontend::tables;

#[test]
fn supported_slot_without_a_driver_returns_not_initialized() {
    type Current = unsafe extern "C" fn(*mut usize) -> u32;
    let table: *const *const c_void = tables::get(tables::TOOLS_TLS).unwrap().cast();
    // SAFETY: the table has four slots.
    let slot = unsafe { table.add(2) };
    // SAFETY: slot 2 is a function of this type.
    let function: Current = unsafe { slot.cast::<Current>().read() };
    let mut context = 7;
    // SAFETY: the argument may be written to.
    assert_eq!(unsafe { function(&raw mut context) }, 3);
    assert_eq!(context, 7);
    assert_eq!(tables::get([0; 16]), None);
}
