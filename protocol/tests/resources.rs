//! Paths to multiprocessors as they cross.

use sluice_protocol::{
    field::{Field, Ordinal, Reader, Writer},
    handle::{GreenContext, Id},
    limits::{self, SM_GROUPS, SM_SPLITS},
    resources::{
        Malformed, Origin, Pick, QueueChoice, ResourceDescription, SmGroup, SmPath, SmResults, SmSplit,
    },
};

fn every_form() -> ResourceDescription {
    let group = |count| SmGroup { count, coscheduled: 8, preferred: 16, flags: 1, domain: u32::MAX };
    ResourceDescription {
        path: SmPath {
            origin: Origin::Green(Id::new(3, 5)),
            splits: vec![
                (SmSplit::ByCount { groups: 2, minimum: u32::MAX, flags: 3 }, Pick::Remainder),
                (SmSplit::Discovery(vec![group(0)]), Pick::Group(0)),
                (SmSplit::Groups((0..96).map(group).collect()), Pick::Group(95)),
            ],
        },
        more: vec![Pick::Group(7), Pick::Remainder],
        queues: QueueChoice::Of(Origin::Device(Ordinal(1))),
    }
}

#[test]
fn description_survives_its_bytes() {
    for queues in [QueueChoice::Any, QueueChoice::Config { limit: 4, scope: 1 }, every_form().queues] {
        let description = ResourceDescription { queues, ..every_form() };
        let bytes = description.encode().unwrap();
        assert_eq!(ResourceDescription::decode(&bytes), Ok(description));
    }
}

#[test]
fn bytes_that_describe_nothing_are_refused() {
    let bytes = every_form().encode().unwrap();
    for end in 0..bytes.len() {
        assert_eq!(ResourceDescription::decode(&bytes[..end]), Err(Malformed), "{end} bytes");
    }
    assert_eq!(
        ResourceDescription::decode(&[bytes.as_slice(), &[0; 8]].concat()),
        Err(Malformed),
        "more bytes"
    );
    let changed = |word: usize, value: u64| {
        let mut bytes = bytes.clone();
        bytes[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        ResourceDescription::decode(&bytes)
    };
    for (word, value) in [
        (0, 2),                                     // an origin of no kind
        (1, Id::<GreenContext>::new(128, 1).raw()), // an id beyond the limit
        (2, SM_SPLITS as u64 + 1),
        (2, u64::MAX),
        (3, 3), // a split of no kind
        (4, SM_GROUPS as u64 + 1),
        (5, 1 << 32),
        (7, SM_GROUPS as u64), // a group that no split can have
        (9, SM_GROUPS as u64 + 1),
    ] {
        assert_eq!(changed(word, value), Err(Malformed), "word {word} is {value:#x}");
    }
}

#[test]
fn description_of_too_many_splits_or_bytes_is_not_made() {
    let mut long = every_form();
    long.path.splits = vec![(SmSplit::Groups(vec![SmGroup::default(); 1]), Pick::Remainder); SM_SPLITS];
    assert!(long.encode().is_some());
    long.path.splits.push((SmSplit::Groups(Vec::new()), Pick::Remainder));
    assert_eq!(long.encode(), None);
    let mut large = every_form();
    large.path.splits = vec![(SmSplit::Groups(vec![SmGroup::default(); 96]), Pick::Remainder); 4];
    assert_eq!(large.encode(), None);
}

#[test]
fn largest_results_fit_into_an_answer() {
    let groups: Vec<_> = (0..96).map(|count| [count, 8, 8, 0, 0]).collect();
    let results = SmResults::new(&groups, [4, 2, 2, 1, 0]).unwrap();
    let mut buffer = [0; limits::REPLY_BYTES];
    let mut writer = Writer::new(&mut buffer);
    results.put(&mut writer).unwrap();
    let length = writer.length();
    let mut reader = Reader::new(&buffer[..length]);
    assert_eq!(SmResults::get(&mut reader), Ok(results));
    assert_eq!(reader.finish(), Ok(()));
    assert_eq!(SmResults::new(&[[0; 5]; SM_GROUPS + 1], [0; 5]), None);
}
