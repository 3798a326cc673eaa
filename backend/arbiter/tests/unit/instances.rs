//! An arbiter whose unit is an instance of a GPU.

use crate::{
    MIB,
    host::{Host, Options},
};
use softgpu_device::{Config, Device, GpuInstance};
use std::sync::Arc;

/// The device of an environment; it is created when it is first opened.
pub(crate) fn device(environment: &[(&'static str, String)]) -> Arc<Device> {
    // The last of several values wins, as in a process.
    let find =
        |name: &str| environment.iter().rev().find(|(key, _)| *key == name).map(|(_, value)| value.into());
    Arc::new(Device::open(&Config::from_variables(&find).unwrap(), 0).unwrap())
}

/// Makes an instance with one compute instance that is all of it; returns it with its UUID.
pub(crate) fn make(device: &Device, profile: u32, start: u32) -> (GpuInstance, [u8; 16]) {
    let instance = device.create_instance(profile, Some(start)).unwrap();
    let known = device.geometry().unwrap().profile(profile).unwrap();
    let full = known.compute.iter().find(|kind| kind.multiprocessors == known.multiprocessors).unwrap();
    let compute = device.create_compute(instance.epoch, full.index, None).unwrap();
    (instance, compute.uuid)
}

// Promise: P45
#[test]
fn arbiter_of_an_instance_takes_only_the_memory_of_that_instance() {
    let mut host = Host::with(Options { instance: Some((9, 4, true)), ..Options::default() });
    let device = device(host.environment());
    let instance = device.instances().remove(0);
    let (total, used) = device.instance_memory(&instance);
    assert!(host.bytes > total / 2 && host.bytes < total, "{} of {total}", host.bytes);
    assert!(used >= host.bytes && device.used_bytes() == used, "{used} of all {}", device.used_bytes());
    // Another instance, made while the arbiter works, has all of its own memory.
    let (other, _) = make(&device, 19, 0);
    assert_eq!(device.instance_memory(&other).1, 0);
    // Memory is lent to workers on the instance as on a whole device.
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    assert_eq!(worker.ask("begin"), "0 0");
    assert_eq!(worker.take_all(), 64 * MIB - host.driver_share());
    assert_eq!(worker.ask("scan 0").split(' ').nth(1), Some("0"), "memory that is lent is zero");
    assert_eq!(device.instance_memory(&other).1, 0);
    assert!(device.destroy_compute(instance.epoch, 0).is_err(), "it is in use");
    host.assert_sound();
}

// Promise: P45
#[test]
fn arbiter_that_sees_another_device_exits_and_takes_no_memory() {
    let mut host = Host::begin(Options { instance: Some((9, 4, false)), ..Options::default() });
    assert!(!host.arbiter.wait().unwrap().success());
    assert_eq!(device(host.environment()).used_bytes(), 0);
}
