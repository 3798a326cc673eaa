//! Programs on instances of one device: each has its own memory and its own share of multiprocessors.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::support::peer::{Peer, serve};
use crate::support::*;
use softgpu_device::{Config, Device, GpuInstance};

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

fn device(state: &Path) -> Arc<Device> {
    let config = Config::from_variables(&|name| match name {
        STATE => Some(state.as_os_str().to_owned()),
        "SLUICE_SOFTGPU_SCALE" => Some("512".into()),
        "SLUICE_SOFTGPU_MODEL" => Some("H100-80".into()),
        "SLUICE_SOFTGPU_MIG" => Some("1".into()),
        _ => None,
    });
    Arc::new(Device::open(&config.unwrap(), 0).unwrap())
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(*uuid));
    let (a, b, c, d, e) = (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
    format!("MIG-{a}-{b}-{c}-{d}-{e}")
}

/// Creates a GPU instance, and a compute instance of its full size. Returns the first, and the UUID of the second.
fn make(device: &Device, profile: u32, start: u32) -> (GpuInstance, String) {
    let made = device.create_instance(profile, Some(start)).unwrap();
    let known = device.geometry().unwrap().profile(profile).unwrap();
    let full = known.compute.iter().find(|kind| kind.multiprocessors == known.multiprocessors).unwrap();
    let compute = device.create_compute(made.epoch, full.index, None).unwrap();
    (made, uuid_text(&compute.uuid))
}

fn on(state: &Path, test: &str, visible: &str) -> Command {
    let mut command = command(&format!("instances::{test}"), state, "peer");
    command.env("SLUICE_SOFTGPU_SCALE", "512").env("CUDA_VISIBLE_DEVICES", visible);
    command
}

// Promise: P41
#[test]
fn programs_on_two_instances_share_no_memory() {
    let state = new_state();
    let device = device(state.path());
    let (one, first) = make(&device, 19, 0);
    let (other, second) = make(&device, 15, 2);
    let (a, b) = (
        Peer::start_as(on(state.path(), "peer_process", &first)),
        Peer::start_as(on(state.path(), "peer_process", &second)),
    );
    a.ask("context").unwrap();
    b.ask("context").unwrap();
    let (ours, theirs) = (9984 / 2 / 512, 20096 / 2 / 512);
    assert_eq!((a.ask("total"), b.ask("total")), (Ok(ours * PAGE), Ok(theirs * PAGE)));
    assert_eq!((a.ask("attribute 16"), b.ask("attribute 16")), (Ok(16), Ok(26)), "multiprocessors");
    // One program fills its instance. The other instance stays empty.
    a.ask(&format!("create 0 {ours} 1")).unwrap();
    assert_eq!((a.ask("free"), b.ask("free")), (Ok(0), Ok(theirs * PAGE)));
    assert_eq!(a.ask(&format!("allocate 1 {PAGE}")), Err(OUT_OF_MEMORY));
    a.ask("map 0").unwrap();
    const TAG: u64 = 0xfeed_f00d_dead_beef;
    a.ask(&format!("fill 0 {TAG}")).unwrap();
    // The other program cannot import an export of the first.
    let shared = a.ask_for("export 0");
    assert!(b.ask_with(&format!("import 5 {ours}"), std::os::fd::AsFd::as_fd(&shared)).is_err());
    // The other program finds none of the first one's data in all the memory that it can get.
    b.ask(&format!("create 1 {theirs} 0")).unwrap();
    b.ask("map 1").unwrap();
    assert_eq!(b.ask(&format!("count 1 {TAG}")), Ok(0));
    assert_eq!(
        (device.instance_memory(&one).1, device.instance_memory(&other).1),
        (ours * PAGE, theirs * PAGE)
    );
    assert!(device.destroy_compute(one.epoch, 0).is_err(), "a process uses it");
    a.kill();
    drop(shared);
    // The export keeps the memory in use, and a process that another test starts at this moment has a copy of it until its exec.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while device.instance_memory(&one).1 > 0 {
        assert!(std::time::Instant::now() < end, "a process still has the export");
        std::thread::sleep(std::time::Duration::from_millis(1));
        device.collect();
    }
    device.destroy_compute(one.epoch, 0).unwrap();
    device.destroy_instance(one.epoch).unwrap();
    // The control: the next instance at this position finds the data, so it was not cleared.
    let (_, third) = make(&device, 19, 0);
    let next = Peer::start_as(on(state.path(), "peer_process", &third));
    next.ask("context").unwrap();
    next.ask(&format!("create 0 {ours} 0")).unwrap();
    next.ask("map 0").unwrap();
    assert_eq!(next.ask(&format!("count 0 {TAG}")), Ok(ours * PAGE / 8));
}

// Promise: P42
#[test]
fn program_sees_its_instance_as_a_device() {
    let state = new_state();
    let device = device(state.path());
    let run = |visible: &str, expected: &str| {
        let mut command = on(state.path(), "devices_seen_in_own_process", visible);
        let output = command.env("EXPECTED", expected).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{visible}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
    };
    // The device is divided and has no instance.
    for visible in ["0", "", "-1", "GPU-", "MIG-"] {
        run(visible, "nothing");
    }
    let (_, uuid) = make(&device, 9, 4);
    let name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb";
    for visible in [uuid.as_str(), "0", &uuid[..20]] {
        run(visible, &format!("{uuid} {name}"));
    }
    run(&format!("{uuid},7"), &format!("{uuid} {name}"));
    run(&format!("7,{uuid}"), "nothing");
}

#[test]
#[ignore = "a part of program_sees_its_instance_as_a_device"]
fn devices_seen_in_own_process() {
    let expected = std::env::var("EXPECTED").unwrap();
    let code = cu!(cuInit(0));
    if expected == "nothing" {
        const NO_DEVICE: u32 = 100;
        assert_eq!(code, NO_DEVICE);
        return;
    }
    assert_eq!(code, 0);
    let mut count = 0;
    ok!(cuDeviceGetCount(&raw mut count));
    assert_eq!(count, 1);
    let (mut name, mut uuid) = ([0u8; 128], [0u8; 16]);
    ok!(cuDeviceGetName(name.as_mut_ptr().cast(), 128, 0));
    ok!(cuDeviceGetUuid_v2(&raw mut uuid, 0));
    let name: Vec<u8> = name.into_iter().take_while(|byte| *byte != 0).collect();
    assert_eq!(format!("{} {}", uuid_text(&uuid), String::from_utf8(name).unwrap()), expected);
}
