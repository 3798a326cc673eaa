//! Resources of devices, and green contexts.

use crate::{
    code::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_RESOURCE_CONFIGURATION, INVALID_VALUE, OUT_OF_MEMORY},
    guest::Guest,
    streams::{function, launch, ready},
};
use sluice_protocol::{
    calls::wire,
    field::{Bytes, Mint, Name, Ordinal, Take},
    handle::{Context, GreenContext, Id, Stream},
    limits,
    resources::{Origin, Pick, QueueChoice, ResourceDescription, SmPath, SmSplit},
    session,
};

fn by_count(groups: u32, minimum: u32) -> SmSplit {
    SmSplit::ByCount { groups, minimum, flags: 0 }
}

fn path(origin: Origin, splits: &[(SmSplit, Pick)]) -> ResourceDescription {
    SmPath { origin, splits: splits.to_vec() }.into()
}

fn device(splits: &[(SmSplit, Pick)]) -> ResourceDescription {
    path(Origin::Device(Ordinal(0)), splits)
}

/// All multiprocessors of the device, and these queues.
fn with_queues(queues: QueueChoice) -> Vec<u8> {
    ResourceDescription { queues, ..device(&[]) }.encode().expect("fits")
}

/// Destroys the primary context, and makes it again.
fn reset(guest: &mut Guest, slot: u32) {
    let gone = wire::context_destroy::Args { context: PRIMARY };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    guest.session.context = guest.create_context(0, slot).raw();
}

/// The counts at the end of a path, and the count that is left over.
fn counts(guest: &mut Guest, of: &ResourceDescription) -> Result<(Vec<u32>, u32), u32> {
    let bytes = of.encode().expect("fits");
    match guest.call(wire::sm_resources::CALL, |w| wire::sm_resources::Args { path: Bytes(&bytes) }.put(w)) {
        (0, fields) => {
            let results = wire::sm_resources::Reply::get(&fields).expect("decodes").results;
            Ok((results.groups().iter().map(|[count, ..]| *count).collect(), results.remainder[0]))
        }
        (failed, _) => Err(failed),
    }
}

fn describe(guest: &mut Guest, bytes: &[u8]) -> Result<u32, u32> {
    let (failed, fields) = guest.call(wire::resource_descriptor::CALL, |w| {
        wire::resource_descriptor::Args { device: Ordinal(0), resources: Bytes(bytes) }.put(w)
    });
    if failed == 0 {
        Ok(wire::resource_descriptor::Reply::get(&fields).expect("decodes").descriptor)
    } else {
        Err(failed)
    }
}

fn create(guest: &mut Guest, of: Id<Context>, descriptor: u32, green: Id<GreenContext>) -> u32 {
    let args = wire::green_create::Args { primary: of, descriptor, green: Mint(green) };
    guest.call(wire::green_create::CALL, |w| args.put(w)).0
}

fn destroy(guest: &mut Guest, green: Id<GreenContext>) -> u32 {
    let args = wire::green_destroy::Args { green: Take(green) };
    guest.call(wire::green_destroy::CALL, |w| args.put(w)).0
}

fn stream_of(guest: &mut Guest, green: Id<GreenContext>, index: u32, slot: u32) -> u32 {
    let stream = Mint(Id::<Stream>::new(index, 1));
    let args = wire::green_stream_create::Args { stream, green, slot, priority: 0 };
    guest.call(wire::green_stream_create::CALL, |w| args.put(w)).0
}

const PRIMARY: Id<Context> = Id::new(0, 1);
const GREEN: Id<GreenContext> = Id::new(0, 1);

// Promise: C105
#[test]
fn path_is_walked_on_the_driver() {
    let (mut guest, _arena) = ready();
    // The null driver has 16 multiprocessors, and 4 or more in a group.
    assert_eq!(counts(&mut guest, &device(&[])), Ok((vec![16], 0)));
    assert_eq!(counts(&mut guest, &device(&[(by_count(2, 5), Pick::Group(0))])), Ok((vec![5; 2], 6)));
    let rest = [(by_count(2, 5), Pick::Remainder), (by_count(9, 0), Pick::Remainder)];
    assert_eq!(counts(&mut guest, &device(&rest)), Ok((vec![4], 2)));
    let third = [(by_count(2, 5), Pick::Group(2)), (by_count(1, 0), Pick::Remainder)];
    assert_eq!(counts(&mut guest, &device(&third)), Err(INVALID_RESOURCE_CONFIGURATION), "there are two");
    let limit = guest
        .call(wire::workqueue_limit::CALL, |w| wire::workqueue_limit::Args { device: Ordinal(0) }.put(w));
    assert_eq!(limit.0, 0);
}

// Promise: C105, C106
#[test]
fn green_context_computes_in_its_streams_and_ends_with_its_primary_context() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work_p2");
    let half = device(&[(by_count(2, 8), Pick::Group(1))]).encode().unwrap();
    let descriptor = describe(&mut guest, &half).unwrap();
    assert_eq!(describe(&mut guest, &half), Ok(descriptor), "the same description");
    assert_eq!(create(&mut guest, PRIMARY, descriptor, GREEN), 0);
    assert_eq!(counts(&mut guest, &path(Origin::Green(GREEN), &[])), Ok((vec![8], 0)));
    assert_eq!(stream_of(&mut guest, GREEN, 1, 3), 0);
    let sequence = launch(&mut guest, 3, kernel, &[0; 16]);
    guest.wait(3, sequence);
    assert_eq!(destroy(&mut guest, GREEN), INVALID_VALUE, "it has a stream");
    guest.post(wire::stream_destroy::CALL, |w| wire::stream_destroy::Args { stream: Id::new(1, 1) }.put(w));
    assert_eq!(destroy(&mut guest, GREEN), 0);
    assert_eq!(destroy(&mut guest, GREEN), INVALID_HANDLE);
    assert_eq!(stream_of(&mut guest, GREEN, 1, 3), INVALID_CONTEXT);

    // The end of the primary context ends its green contexts, each of which retains it.
    let second = Id::new(0, 2);
    assert_eq!(create(&mut guest, PRIMARY, descriptor, second), 0);
    assert_eq!(stream_of(&mut guest, second, 2, 4), 0);
    let gone = wire::context_destroy::Args { context: PRIMARY };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    assert_eq!(destroy(&mut guest, second), INVALID_HANDLE);
    // If a green context still retained it, this would be the old context, and the driver would end the worker.
    let again = guest.create_context(0, 5);
    guest.session.context = again.raw();
    assert!(guest.allocate(4096).is_ok());
}

// Promise: C106
#[test]
fn forged_resources_are_refused_and_the_session_continues() {
    let (mut guest, _arena) = ready();
    let good = device(&[]).encode().unwrap();
    for length in 0..good.len() {
        assert_eq!(describe(&mut guest, &good[..length]), Err(INVALID_VALUE), "{length} bytes");
    }
    assert_eq!(describe(&mut guest, &[0xff; limits::DESCRIPTION_BYTES]), Err(INVALID_VALUE));
    let unknown = path(Origin::Green(Id::new(7, 1)), &[]);
    assert_eq!(counts(&mut guest, &unknown), Err(INVALID_VALUE));
    assert!(counts(&mut guest, &path(Origin::Device(Ordinal(99)), &[])).is_err());
    let descriptor = describe(&mut guest, &good).unwrap();
    for wrong in [descriptor + 1, u32::MAX] {
        assert_eq!(create(&mut guest, PRIMARY, wrong, GREEN), INVALID_VALUE);
    }
    // Only a primary context has green contexts: another would not be charged for the primary one.
    let ordinary = guest.create_context(1, 6);
    assert_eq!(create(&mut guest, ordinary, descriptor, GREEN), INVALID_CONTEXT);
    assert_eq!(create(&mut guest, Id::new(9, 1), descriptor, GREEN), INVALID_CONTEXT);
    assert_eq!(create(&mut guest, PRIMARY, descriptor, GREEN), 0);
    assert_eq!(create(&mut guest, PRIMARY, descriptor, GREEN), INVALID_VALUE, "the id is taken");
    guest.session.context = ordinary.raw();
    assert_eq!(stream_of(&mut guest, GREEN, 1, 3), INVALID_VALUE, "a stream in another context");
    assert_eq!(guest.state(), session::READY);
}

// Promise: C106
#[test]
fn descriptors_of_a_session_are_bounded() {
    let (mut guest, _arena) = ready();
    let mut next = (4..=16).flat_map(|minimum| (1..=96).map(move |groups| by_count(groups, minimum)));
    let mut describe_next = |guest: &mut Guest| {
        let split = next.next().expect("as many descriptions");
        describe(guest, &device(&[(split, Pick::Group(0))]).encode().unwrap())
    };
    for _ in 0..limits::RESOURCE_DESCRIPTORS {
        describe_next(&mut guest).unwrap();
    }
    assert_eq!(describe_next(&mut guest), Err(OUT_OF_MEMORY));
    assert_eq!(create(&mut guest, PRIMARY, 0, GREEN), 0, "those that there are stay");
}

// Promise: C106
#[test]
fn descriptor_with_queues_of_a_context_ends_with_that_context() {
    let (mut guest, _arena) = ready();
    let of_device = with_queues(QueueChoice::Of(Origin::Device(Ordinal(0))));
    // The queues are those of the primary context, whatever context is current.
    let ordinary = guest.create_context(1, 6);
    guest.session.context = ordinary.raw();
    let first = describe(&mut guest, &of_device).unwrap();
    let gone = wire::context_destroy::Args { context: ordinary };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    guest.session.context = PRIMARY.raw();
    assert_eq!(describe(&mut guest, &of_device), Ok(first), "the same queues");
    assert_eq!(create(&mut guest, PRIMARY, first, GREEN), 0);

    // The null driver ends the worker at a call with queues of a context that is gone.
    let of_green = with_queues(QueueChoice::Of(Origin::Green(GREEN)));
    let second = describe(&mut guest, &of_green).unwrap();
    assert_eq!(describe(&mut guest, &of_green), Ok(second));
    let other = Id::new(1, 1);
    assert_eq!(create(&mut guest, PRIMARY, second, other), 0);
    assert_eq!(destroy(&mut guest, other), 0);
    assert_eq!(destroy(&mut guest, GREEN), 0);
    assert_eq!(describe(&mut guest, &of_green), Err(INVALID_VALUE), "no such green context");
    assert_eq!(create(&mut guest, PRIMARY, second, other), INVALID_VALUE);
    // The same bytes name another green context now.
    assert_eq!(create(&mut guest, PRIMARY, first, GREEN), 0);
    let third = describe(&mut guest, &of_green).unwrap();
    assert_ne!(third, second);
    assert_eq!(create(&mut guest, PRIMARY, third, other), 0);

    reset(&mut guest, 5);
    for ended in [first, second, third] {
        assert_eq!(create(&mut guest, PRIMARY, ended, GREEN), INVALID_VALUE);
    }
    let fourth = describe(&mut guest, &of_device).unwrap();
    assert!(![first, second, third].contains(&fourth));
    assert_eq!(create(&mut guest, PRIMARY, fourth, GREEN), 0);

    let gone = wire::context_destroy::Args { context: PRIMARY };
    assert_eq!(guest.call(wire::context_destroy::CALL, |w| gone.put(w)).0, 0);
    assert_eq!(describe(&mut guest, &of_device), Err(INVALID_CONTEXT), "no primary context");
    assert_eq!(guest.worker.try_wait().unwrap(), None);
}

// Promise: C105
#[test]
fn resources_of_equal_green_contexts_make_one_descriptor() {
    let (mut guest, _arena) = ready();
    let half = device(&[(by_count(2, 8), Pick::Group(1))]).encode().unwrap();
    let descriptor = describe(&mut guest, &half).unwrap();
    let mut parts = Vec::new();
    for generation in 1..=3 {
        let green = Id::new(0, generation);
        assert_eq!(create(&mut guest, PRIMARY, descriptor, green), 0);
        let whole = path(Origin::Green(green), &[]).encode().unwrap();
        assert_eq!(describe(&mut guest, &whole), Ok(descriptor), "the same multiprocessors");
        let part = path(Origin::Green(green), &[(by_count(1, 4), Pick::Group(0))]).encode().unwrap();
        parts.push(describe(&mut guest, &part).unwrap());
        assert_eq!(destroy(&mut guest, green), 0);
    }
    assert_eq!(parts, [parts[0]; 3]);
    // A descriptor outlives the green context that it comes from.
    assert_eq!(create(&mut guest, PRIMARY, parts[0], GREEN), 0);
    assert_eq!(counts(&mut guest, &path(Origin::Green(GREEN), &[])), Ok((vec![4], 0)));
}

// Promise: C106
#[test]
fn queues_that_the_device_does_not_have_are_refused() {
    let (mut guest, _arena) = ready();
    let limit = guest
        .call(wire::workqueue_limit::CALL, |w| wire::workqueue_limit::Args { device: Ordinal(0) }.put(w));
    let limit = wire::workqueue_limit::Reply::get(&limit.1).expect("decodes").limit;
    let mut describe_config =
        |limit, scope| describe(&mut guest, &with_queues(QueueChoice::Config { limit, scope }));
    for (limit, scope) in [(0, 0), (limit + 1, 0), (u32::MAX, 0), (limit, 2), (limit, u32::MAX)] {
        assert_eq!(describe_config(limit, scope), Err(INVALID_VALUE), "{limit} in scope {scope}");
    }
    for (limit, scope) in [(1, 0), (limit, 1)] {
        assert!(describe_config(limit, scope).is_ok(), "{limit} in scope {scope}");
    }
}

// Promise: C106
#[test]
fn green_context_that_the_driver_does_not_destroy_ends_with_its_primary_context() {
    let (mut guest, _arena) = ready();
    function(&mut guest, 0, "work");
    // Each context of the null driver has its variables at an address of its own.
    let variables = |guest: &mut Guest| {
        let (result, fields) = guest.call(wire::module_global::CALL, |w| {
            wire::module_global::Args { module: Id::new(0, 1), name: Name(b"variable") }.put(w)
        });
        assert_eq!(result, 0);
        wire::module_global::Reply::get(&fields).unwrap().address
    };
    let before = variables(&mut guest);
    // The null driver refuses its first destruction.
    let stays = device(&[(by_count(1, 13), Pick::Group(0))]).encode().unwrap();
    let descriptor = describe(&mut guest, &stays).unwrap();
    assert_eq!(create(&mut guest, PRIMARY, descriptor, GREEN), 0);
    assert_eq!(destroy(&mut guest, GREEN), INVALID_VALUE);
    reset(&mut guest, 5);
    assert_ne!(variables(&mut guest), before, "the green context retains the old primary context no longer");
}
