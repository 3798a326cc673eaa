//! The filter of `sluice-inventory`. The management library opens devices and reads files for as long as it lives; it never
//! needs another program, another process or a network. The device nodes have to exist: a library that would create them with a
//! helper program is killed.

use crate::{
    common,
    driver::{self, DriverList},
    filter::{FilterProfile, Rule},
    ioctls::DriverUser,
};
use libc::*;

/// The request that makes a descriptor non-blocking, whose type differs between C libraries.
const SET_NONBLOCKING: i32 = 0x5421;

pub(crate) fn profile(list: DriverList) -> FilterProfile {
    let mut ours = common::rules();
    ours.extend([
        common::descriptors(&[]),
        Rule::one_of(SYS_ioctl, 1, &[SET_NONBLOCKING], "the socket of a new client"),
        Rule::any(SYS_writev, "the C library's message before it ends the process"),
    ]);
    driver::profile(ours, list, DriverUser::Inventory)
}
