//! The call table: every row round-trips, other bytes are refused, and no record or answer exceeds its place.

#![expect(clippy::cast_possible_truncation, reason = "values are cut out of random words")]

use proptest::prelude::*;
#[allow(clippy::wildcard_imports, reason = "the kinds of objects, in one list")]
use sluice_protocol::handle::*;
use sluice_protocol::{
    calls::{
        self, Attributes, CallError, Dispatched, FunctionAttributes, Handler, Outcome, Parameters, RETIRED,
        WIRE, wire,
    },
    field::{
        AccessFlags, ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, ArenaText, Bytes, CarriedOptions,
        DeviceAddress, ElementSize, Field, FieldError, LaunchAttributes, Mint, Name, Ordinal, ParameterBytes,
        Reader, Size, Take, Writer,
    },
    for_each_wire_call,
    image::{ImageResource, ImageView, LinearImage, Sampling, ViewedPart},
    limits,
    record::{self, Header},
    resources::{ResourceBytes, SmResults},
};
use std::{marker::PhantomData, sync::LazyLock};

/// Bytes for inline fields, none of them 0 so that they serve for names, too.
static POOL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    (0..limits::PARAMETER_BYTES.max(limits::NAME_BYTES) + 64).map(|i| (i % 255) as u8 + 1).collect()
});

/// Random words that values are made of.
struct Source<'a> {
    words: std::iter::Cycle<std::slice::Iter<'a, u64>>,
}

impl Source<'_> {
    fn new(words: &[u64]) -> Source<'_> {
        Source { words: words.iter().cycle() }
    }
    fn word(&mut self) -> u64 {
        *self.words.next().expect("a cycle of at least one word")
    }
    /// A number up to `limit`: either end often.
    fn up_to(&mut self, limit: u64) -> u64 {
        match self.word() % 4 {
            0 => 0,
            1 => limit,
            _ => self.word() % limit.saturating_add(1).max(1),
        }
    }
    fn slice(&mut self, limit: usize) -> &'static [u8] {
        let length = self.up_to(limit as u64) as usize;
        let start = self.up_to(63) as usize;
        &POOL[start..start + length]
    }
}

/// A parameter kind in the tests: a random value, and the most bytes it takes.
trait Sample {
    const MOST: usize;
    fn sample(source: &mut Source<'_>) -> Self;
}

macro_rules! samples {
    ($($ty:ty: $most:expr, |$source:ident| $value:expr;)+) => {$(
        impl Sample for $ty {
            const MOST: usize = $most;
            fn sample($source: &mut Source<'_>) -> Self {
                $value
            }
        }
    )+};
}

samples! {
    u32: 8, |source| source.word() as u32;
    u64: 8, |source| source.word();
    u128: 16, |source| u128::from(source.word()) << 64 | u128::from(source.word());
    i32: 8, |source| source.word() as i32;
    f32: 8, |source| f32::from_bits(source.word() as u32);
    bool: 8, |source| source.word() % 2 == 1;
    [u32; 3]: 24, |source| std::array::from_fn(|_| source.word() as u32);
    [u64; 3]: 24, |source| std::array::from_fn(|_| source.word());
    LinearImage: 32, |source| LinearImage {
        address: source.word(), format: source.word() as u32, channels: source.word() as u32, length: source.word(),
    };
    ImageResource: 56, |source| match source.word() % 5 {
        0 => ImageResource::Nothing,
        1 => ImageResource::Pitched {
            memory: LinearImage::sample(source), height: source.word(), pitch: source.word(),
        },
        2 => ImageResource::Mipmapped(Id::sample(source)),
        3 => ImageResource::Linear(LinearImage::sample(source)),
        _ => ImageResource::Array(Id::sample(source)),
    };
    Sampling: 14 * 8, |source| Sampling {
        address_modes: Sample::sample(source),
        filter: source.word() as u32,
        flags: source.word() as u32,
        anisotropy: source.word() as u32,
        level_filter: source.word() as u32,
        level_bias: source.word() as u32,
        level_clamp: std::array::from_fn(|_| source.word() as u32),
        border: std::array::from_fn(|_| source.word() as u32),
    };
    ImageView: 9 * 8, |source| ImageView((source.word() % 2 == 1).then(|| ViewedPart {
        format: source.word() as u32,
        extent: Sample::sample(source),
        range: std::array::from_fn(|_| source.word() as u32),
    }));
    [u32; 13]: 104, |source| std::array::from_fn(|_| source.word() as u32);
    [u32; 5]: 40, |source| std::array::from_fn(|_| source.word() as u32);
    [u64; 5]: 40, |source| std::array::from_fn(|_| source.word());
    [u64; 8]: 64, |source| std::array::from_fn(|_| source.word());
    DeviceAddress: 8, |source| DeviceAddress(source.word());
    Ordinal: 8, |source| Ordinal(source.word() as u32);
    AccessFlags: 8, |source| [AccessFlags::None, AccessFlags::Read, AccessFlags::ReadWrite][source.word() as usize % 3];
    ElementSize: 8, |source| [ElementSize::Byte, ElementSize::Half, ElementSize::Word][source.word() as usize % 3];
    ArenaRowsIn: 32, |source| ArenaRowsIn {
        address: source.word(), pitch: source.word(), width: source.word(), height: source.word(),
    };
    ArenaRowsOut: 32, |source| ArenaRowsOut {
        address: source.word(), pitch: source.word(), width: source.word(), height: source.word(),
    };
    Attributes: limits::DEVICE_ATTRIBUTES.div_ceil(2) * 8,
        |source| Attributes(std::array::from_fn(|_| source.word() as i32));
    FunctionAttributes: 9 * 8, |source| FunctionAttributes(std::array::from_fn(|_| source.word() as i32));
    SmResults: 1952, |source| {
        let group = |source: &mut Source<'_>| std::array::from_fn(|_| source.word() as u32);
        let groups: Vec<_> = (0..source.word() as usize % (limits::SM_GROUPS + 1)).map(|_| group(source)).collect();
        SmResults::new(&groups, group(source)).unwrap()
    };
    Parameters: 8 + limits::PARAMETERS.div_ceil(2) * 8, |source| {
        let mut parameters = Parameters::NONE;
        for _ in 0..source.up_to(limits::PARAMETERS as u64) {
            parameters.push(source.word() as u16 as usize, source.word() as u16 as usize).unwrap();
        }
        parameters
    };
}

const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

impl<const N: usize> Sample for [u8; N] {
    const MOST: usize = padded(N);
    fn sample(source: &mut Source<'_>) -> Self {
        std::array::from_fn(|_| source.word() as u8)
    }
}
impl<const LIMIT: u64> Sample for Size<LIMIT> {
    const MOST: usize = 8;
    fn sample(source: &mut Source<'_>) -> Self {
        Size(source.up_to(LIMIT))
    }
}
macro_rules! ranges {
    ($($range:ident),+) => {$(
        impl<const LIMIT: u64> Sample for $range<LIMIT> {
            const MOST: usize = 16;
            fn sample(source: &mut Source<'_>) -> Self {
                $range { address: source.word(), bytes: source.up_to(LIMIT) }
            }
        }
    )+};
}
ranges!(ArenaIn, ArenaOut, ArenaText);

impl Sample for CarriedOptions<'_> {
    const MOST: usize = 8 + limits::JIT_OPTIONS * 8;
    fn sample(source: &mut Source<'_>) -> Self {
        let count = source.up_to(limits::JIT_OPTIONS as u64) as usize;
        CarriedOptions::new(&POOL[..count * 8]).expect("whole options")
    }
}
impl Sample for LaunchAttributes<'_> {
    const MOST: usize = 8 + limits::LAUNCH_ATTRIBUTES * LaunchAttributes::EACH;
    fn sample(source: &mut Source<'_>) -> Self {
        let count = source.up_to(limits::LAUNCH_ATTRIBUTES as u64) as usize;
        LaunchAttributes(&POOL[..count * LaunchAttributes::EACH])
    }
}
impl Sample for Name<'_> {
    const MOST: usize = 8 + padded(limits::NAME_BYTES);
    fn sample(source: &mut Source<'_>) -> Self {
        Name(source.slice(limits::NAME_BYTES))
    }
}
impl<const LIMIT: usize> Sample for Bytes<'_, LIMIT> {
    const MOST: usize = 8 + padded(LIMIT);
    fn sample(source: &mut Source<'_>) -> Self {
        Bytes(source.slice(LIMIT))
    }
}
impl<K: Kind> Sample for Id<K> {
    const MOST: usize = 8;
    fn sample(source: &mut Source<'_>) -> Self {
        Id::new(source.up_to(u64::from(K::LIMIT) - 1) as u32, source.word() as u32)
    }
}
impl<K: Kind> Sample for Take<K> {
    const MOST: usize = 8;
    fn sample(source: &mut Source<'_>) -> Self {
        Take(Id::sample(source))
    }
}
impl<K: Kind> Sample for Mint<K> {
    const MOST: usize = 8;
    fn sample(source: &mut Source<'_>) -> Self {
        Mint(Id::sample(source))
    }
}

/// Appends one or more fields.
type Put<'f> = &'f dyn Fn(&mut Writer<'_>) -> Result<(), FieldError>;

fn put<'a>(fields: &[Put<'_>], buffer: &'a mut [u8]) -> &'a [u8] {
    let mut writer = Writer::new(buffer);
    fields.iter().for_each(|field| field(&mut writer).unwrap());
    let length = writer.length();
    &buffer[..length]
}

/// A host that records its requests, as bytes again, and answers random values.
struct Recorder<'w> {
    header: Option<Header>,
    fields: Vec<u8>,
    source: Source<'w>,
    answer: Vec<u8>,
    reply_with: fn(u32) -> bool,
}

impl<'w> Recorder<'w> {
    fn new(words: &'w [u64]) -> Recorder<'w> {
        Recorder {
            header: None,
            fields: Vec::new(),
            source: Source::new(words),
            answer: Vec::new(),
            reply_with: |_| true,
        }
    }
}

/// The lifetime in which the table's kinds are written.
struct Table<'a>(PhantomData<&'a ()>);

macro_rules! table {
    ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
        ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
        impl Handler for Recorder<'_> {
            $($(fn $name$(<$life>)?(&mut self, header: &Header, args: wire::$name::Args$(<$life>)?)
                -> Outcome<wire::$name::Reply> {
                self.header = Some(*header);
                let mut buffer = vec![0; limits::RECORD_BYTES];
                self.fields = put(&[$(&|writer| args.$p.put(writer)),*], &mut buffer).to_vec();
                let _ = &args;
                if !(self.reply_with)($id) {
                    return Outcome::Failed($id);
                }
                let reply = wire::$name::Reply { $($r: Sample::sample(&mut self.source)),* };
                self.answer = put(&[&|writer| reply.put(writer)], &mut [0; limits::REPLY_BYTES]).to_vec();
                Outcome::Done(reply)
            })+)+
        }

        /// A valid record of the row with this id.
        #[allow(clippy::extra_unused_lifetimes, reason = "the lifetime of the table's inline fields")]
        fn any_record<'a>(id: u16, source: &mut Source<'_>) -> Vec<u8> {
            let header = Header {
                call: id,
                reply: source.word() as u32,
                ticket: source.word() as u32,
                context: source.word(),
                stream: source.word() as u32,
                thread: source.word() as u32,
                sequence: source.word(),
            };
            let mut buffer = vec![0xff; limits::RECORD_BYTES];
            let record = match id {
                $($($id => {
                    $(let $p = <$ty as Sample>::sample(source);)*
                    header.build(&mut buffer, |writer| wire::$name::Args { $($p),* }.put(writer)).unwrap()
                })+)+
                _ => unreachable!("ids come from the table"),
            };
            record.to_vec()
        }

        /// The answer's bytes decode to values that encode to the same bytes, and to nothing else when cut or extended.
        fn check_answer(id: u16, answer: &[u8]) {
            match id {
                $($($id => {
                    let reply = wire::$name::Reply::get(answer).unwrap();
                    assert_eq!(put(&[&|writer| reply.put(writer)], &mut [0; limits::REPLY_BYTES]), answer);
                    for cut in (0..answer.len()).step_by(8) {
                        assert!(wire::$name::Reply::get(&answer[..cut]).is_err(), "cut at {cut}");
                    }
                    let longer = [answer, &[0; 8]].concat();
                    assert_eq!(wire::$name::Reply::get(&longer).unwrap_err(), FieldError::Trailing);
                })+)+
                _ => unreachable!("ids come from the table"),
            }
        }

        /// A host may answer anything: an error or values, never a panic.
        fn decode_any_answer(id: u16, answer: &[u8]) {
            match id {
                $($($id => { let _ = wire::$name::Reply::get(answer); })+)+
                _ => unreachable!("ids come from the table"),
            }
        }

        impl<'a> Table<'a> {
            /// The most bytes of fields and of answer of every row.
            const MOST: &'static [(u16, usize, usize)] =
                &[$($(($id, 0 $(+ <$ty as Sample>::MOST)*, 0 $(+ <$rty as Sample>::MOST)*)),+),+];
        }
    };
}
for_each_wire_call!(table);

const MOST: &[(u16, usize, usize)] = Table::MOST;

// No record and no answer of the table can exceed its place, and no id is given twice: checked when this file is compiled.
const _: () = {
    let mut i = 0;
    while i < MOST.len() {
        let (_, fields, answer) = MOST[i];
        assert!(record::HEADER_BYTES + fields <= limits::RECORD_BYTES, "a record would not fit");
        assert!(answer <= limits::REPLY_BYTES, "an answer would not fit its slot");
        assert!(WIRE[i].id < calls::C[0].id, "one space of ids for both tables");
        let mut other = 0;
        while other < i {
            assert!(WIRE[other].id != WIRE[i].id, "an id is given once");
            other += 1;
        }
        let mut retired = 0;
        while retired < RETIRED.len() {
            assert!(RETIRED[retired] != WIRE[i].id, "a retired id does not come again");
            retired += 1;
        }
        i += 1;
    }
    let mut i = 1;
    while i < calls::C.len() {
        assert!(calls::C[i - 1].id < calls::C[i].id, "ids of C functions ascend");
        i += 1;
    }
};

fn any_row() -> impl Strategy<Value = u16> {
    prop::sample::select(WIRE).prop_map(|row| row.id)
}

fn words() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![any::<u64>(), 0..8u64, Just(u64::MAX), Just(1 << 63)];
    prop::collection::vec(word, 1..40)
}

fn dispatch(recorder: &mut Recorder<'_>, record: &[u8]) -> Result<(Dispatched, Vec<u8>), CallError> {
    let mut answer = [0; limits::REPLY_BYTES];
    let (header, fields) = Header::read(record).unwrap();
    let done = calls::dispatch(recorder, &header, fields, &mut answer)?;
    let length = if let Dispatched::Done(length) = done { length } else { 0 };
    Ok((done, answer[..length].to_vec()))
}

/// Every row, with the same random words: there, decoded, back.
fn there_and_back(words: &[u64]) {
    for row in WIRE {
        let record = any_record(row.id, &mut Source::new(words));
        let (header, fields) = Header::read(&record).unwrap();
        assert_eq!(header.call, row.id);
        let mut recorder = Recorder::new(words);
        let (done, answer) = dispatch(&mut recorder, &record).unwrap_or_else(|e| panic!("{}: {e}", row.name));
        assert_eq!(recorder.header, Some(header), "{}", row.name);
        assert_eq!(recorder.fields, fields, "{}: the host saw other arguments", row.name);
        assert_eq!(done, Dispatched::Done(answer.len()));
        assert_eq!(answer, recorder.answer, "{}: another answer", row.name);
        check_answer(row.id, &answer);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: C5
    #[test]
    fn every_call_arrives_unchanged(words in words()) {
        there_and_back(&words);
    }

    // Promise: V4
    #[test]
    fn cut_and_extended_records_are_refused(id in any_row(), words in words(), at: prop::sample::Index) {
        let record = any_record(id, &mut Source::new(&words));
        let fields = record.len() - record::HEADER_BYTES;
        if fields > 0 {
            let cut = record::HEADER_BYTES + at.index(fields);
            let error = dispatch(&mut Recorder::new(&words), &record[..cut]).unwrap_err();
            prop_assert_eq!(error, CallError::Field { call: id, error: FieldError::Short });
        }
        let longer = [&record[..], &[0; 8]].concat();
        let error = dispatch(&mut Recorder::new(&words), &longer).unwrap_err();
        prop_assert_eq!(error, CallError::Field { call: id, error: FieldError::Trailing });
    }

    // Promise: V4
    #[test]
    fn random_fields_are_refused_or_decode_to_stable_values(
        id in any_row(), words in words(), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        junk in prop::option::of(prop::collection::vec(any::<u8>(), 0..256)),
    ) {
        let mut record = any_record(id, &mut Source::new(&words));
        if let Some(junk) = junk {
            record.truncate(record::HEADER_BYTES);
            record.extend(junk);
        }
        for (at, value) in flips {
            let fields = record.len() - record::HEADER_BYTES;
            if fields > 0 {
                record[record::HEADER_BYTES + at.index(fields)] = value;
            }
        }
        let mut recorder = Recorder::new(&words);
        if dispatch(&mut recorder, &record).is_ok() {
            // Padding may differ from ours, so compare the decoded fields: a second pass changes nothing.
            let canonical = [&record[..record::HEADER_BYTES], &recorder.fields].concat();
            prop_assert_eq!(canonical.len(), record.len());
            let mut again = Recorder::new(&words);
            dispatch(&mut again, &canonical).unwrap();
            prop_assert_eq!(again.fields, recorder.fields);
        }
    }

    // Promise: G1
    #[test]
    fn random_answer_is_refused_or_decodes(id in any_row(), answer in prop::collection::vec(any::<u8>(), 0..limits::REPLY_BYTES)) {
        decode_any_answer(id, &answer);
    }

    #[test]
    fn id_without_a_row_is_unknown(id: u16) {
        prop_assume!(WIRE.iter().all(|row| row.id != id));
        let header = Header { call: id, reply: 0, ticket: 0, context: 0, stream: 0, thread: 0, sequence: 0 };
        let done = calls::dispatch(&mut Recorder::new(&[1]), &header, &[], &mut [0; limits::REPLY_BYTES]);
        prop_assert_eq!(done, Err(CallError::Unknown(id)));
    }

    #[test]
    fn ids_of_objects_round_trip_and_are_typed(index in 0..limits::CONTEXTS, generation: u32, raw: u64) {
        fn check<K: Kind>(index: u32, generation: u32, raw: u64) {
            let id = Id::<K>::new(index, generation);
            assert_eq!(Id::<K>::from_raw(id.raw()), Some(id));
            assert_eq!(id.index(), index as usize);
            assert_eq!(id.generation(), (generation & 0xff_ffff).max(1));
            assert_eq!(id.raw() >> 56, u64::from(K::TAG));
            assert_eq!(Id::<K>::from_raw(Id::<K>::new(K::LIMIT, 1).raw()), None, "index at the limit");
            assert_eq!(Id::<K>::from_raw(id.raw() & !(0xff_ffff << 32)), None, "generation 0");
            // CUDA's special stream values, and NULL.
            assert!((0..=2).all(|special| Id::<K>::from_raw(special).is_none()));
            if let Some(found) = Id::<K>::from_raw(raw) {
                assert_eq!(found.raw(), raw);
                assert!(found.index() < K::LIMIT as usize);
            }
        }
        check::<Context>(index, generation, raw);
        check::<Stream>(index, generation, raw);
        check::<Event>(index, generation, raw);
        check::<Module>(index, generation, raw);
        check::<Function>(index, generation, raw);
        let id = Id::<Stream>::new(index, generation).raw();
        prop_assert_eq!(Id::<Event>::from_raw(id), None);
        prop_assert_eq!(Id::<Context>::from_raw(id), None);
    }

    #[test]
    fn packed_attributes_and_parameters_round_trip(words in words()) {
        fn check<T: for<'a> Field<'a> + Sample + PartialEq + std::fmt::Debug>(words: &[u64]) {
            let value = T::sample(&mut Source::new(words));
            let mut buffer = [0xff; limits::REPLY_BYTES];
            let bytes = put(&[&|writer| value.put(writer)], &mut buffer);
            assert!(bytes.len() <= T::MOST);
            let mut reader = Reader::new(bytes);
            assert_eq!(T::get(&mut reader).unwrap(), value);
            reader.finish().unwrap();
        }
        check::<Attributes>(&words);
        check::<FunctionAttributes>(&words);
        check::<Parameters>(&words);
    }
}

#[test]
fn failing_call_answers_its_error() {
    for row in WIRE {
        let record = any_record(row.id, &mut Source::new(&[3, 5]));
        let mut recorder = Recorder::new(&[1]);
        recorder.reply_with = |_| false;
        let (done, _) = dispatch(&mut recorder, &record).unwrap();
        assert_eq!(done, Dispatched::Failed(u32::from(row.id)));
    }
}

#[test]
fn largest_record_of_each_call_fits() {
    for row in WIRE {
        // Only ones: `up_to` gives its limit each time.
        let record = any_record(row.id, &mut Source::new(&[1]));
        let most = MOST.iter().find(|most| most.0 == row.id).unwrap();
        assert_eq!(record.len(), record::HEADER_BYTES + most.1, "{}", row.name);
    }
}

#[test]
fn posts_have_no_results_and_names_are_unique() {
    let mut names: Vec<_> = WIRE.iter().map(|row| row.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), WIRE.len());
    for row in WIRE {
        assert!(["post", "work", "sync", "wait"].contains(&row.class), "{}", row.name);
        assert!(!["post", "work"].contains(&row.class) || row.results.is_empty(), "{}", row.name);
        assert!(!row.doc.is_empty(), "{} has a description", row.name);
    }
}

/// A handle of one kind would be taken for one of another.
#[test]
fn no_two_kinds_of_handles_have_one_tag() {
    let tags: Vec<u8> = TAGS.concat();
    let mut distinct = tags.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), tags.len(), "{tags:02x?}");
}

#[test]
fn values_outside_their_kind_are_refused() {
    fn refuse<'a, T: Field<'a> + std::fmt::Debug>(words: &'a [u8], error: FieldError) {
        assert_eq!(T::get(&mut Reader::new(words)).unwrap_err(), error);
    }
    let word = |value: u64| value.to_le_bytes();
    refuse::<u8>(&word(256), FieldError::Range);
    refuse::<u16>(&word(1 << 16), FieldError::Range);
    refuse::<u32>(&word(1 << 32), FieldError::Range);
    refuse::<i32>(&word(u64::MAX), FieldError::Range);
    refuse::<f32>(&word(1 << 32), FieldError::Range);
    refuse::<bool>(&word(2), FieldError::Range);
    refuse::<Size<10>>(&word(11), FieldError::Range);
    refuse::<Bytes<'_, 16>>(&[word(17), word(0), word(0), word(0)].concat(), FieldError::Range);
    refuse::<Bytes<'_, 16>>(&[word(9), word(0)].concat(), FieldError::Short);
    refuse::<Bytes<'_, 16>>(&word(u64::MAX), FieldError::Range);
    refuse::<AccessFlags>(&word(2), FieldError::Range);
    refuse::<ElementSize>(&word(3), FieldError::Range);
    refuse::<ArenaIn<10>>(&[word(0), word(11)].concat(), FieldError::Range);
    refuse::<Name<'_>>(&[word(3), word(u64::from_le_bytes(*b"a\0b\0\0\0\0\0"))].concat(), FieldError::Range);
    refuse::<Parameters>(&word(limits::PARAMETERS as u64 + 1), FieldError::Range);
    refuse::<Parameters>(&word(u64::MAX), FieldError::Range);
    refuse::<Id<Stream>>(&word(Id::<Event>::new(0, 1).raw()), FieldError::Id);
    // The guest's own encoder refuses, too: nothing is cut silently.
    let mut buffer = [0; 64];
    assert_eq!(Bytes::<4>(b"12345").put(&mut Writer::new(&mut buffer)), Err(FieldError::Range));
    assert_eq!(Writer::new(&mut buffer).bytes(&[0; 65]), Err(FieldError::Long));
    let mut parameters = Parameters::NONE;
    assert_eq!(parameters.push(1 << 16, 0), Err(FieldError::Long));
    assert_eq!(parameters.push(0, 1 << 16), Err(FieldError::Long));
    (0..limits::PARAMETERS).for_each(|i| parameters.push(i, 1).unwrap());
    assert_eq!(parameters.push(0, 1), Err(FieldError::Long));
    assert_eq!(parameters.entries().len(), limits::PARAMETERS);
}
