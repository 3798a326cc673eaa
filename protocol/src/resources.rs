//! Resources for green contexts as they cross: a path that leads to multiprocessors, never the bytes of a driver.
//!
//! A program passes resources by value, so it can forge one, and a driver does not check the bytes that it wrote into them. A path
//! says instead how the program got the multiprocessors: from a device or a green context, by splits, each with the group to go on
//! with. The worker walks the path on its driver whenever it is used; so a path is valid in another worker, too, and the worst path
//! gives a part of the session's own device.

use crate::{
    field::{Bytes, Field, FieldError, Ordinal, Reader, Writer},
    handle::{GreenContext, Id},
    limits::{DESCRIPTION_BYTES, SM_GROUPS, SM_SPLITS},
};

/// A [`ResourceDescription`] as it crosses.
pub type ResourceBytes<'a> = Bytes<'a, DESCRIPTION_BYTES>;

/// Bytes of a group in [`SmResults`].
const GROUP_BYTES: usize = 20;

/// The start of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// All multiprocessors of a device.
    Device(Ordinal),
    /// Those of a green context.
    Green(Id<GreenContext>),
}

/// The group of a split with which a path goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The result with this number.
    Group(u32),
    /// The multiprocessors that are left over.
    Remainder,
}

/// A group as `cuDevSmResourceSplit` takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SmGroup {
    /// Number of multiprocessors; 0 asks for as many as there are.
    pub count: u32,
    /// Number of multiprocessors that run blocks of one cluster.
    pub coscheduled: u32,
    /// The same number where the device can do better.
    pub preferred: u32,
    /// The flags of the group.
    pub flags: u32,
    /// The locality domain.
    pub domain: u32,
}

/// One split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SmSplit {
    /// `cuDevSmResourceSplitByCount`: groups of one size.
    ByCount {
        /// The most groups.
        groups: u32,
        /// The least multiprocessors of each.
        minimum: u32,
        /// The flags of the call.
        flags: u32,
    },
    /// `cuDevSmResourceSplit`: groups of different sizes.
    Groups(Vec<SmGroup>),
    /// The same without results: only the counts are found.
    Discovery(Vec<SmGroup>),
}

/// Splits, from an origin to a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmPath {
    /// The start.
    pub origin: Origin,
    /// Each split, with the group to go on with.
    pub splits: Vec<(SmSplit, Pick)>,
}

/// The work queues of a green context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueChoice {
    /// Those that the driver chooses.
    #[default]
    Any,
    /// New ones.
    Config {
        /// Expected number of workloads at a time: from 1 to the number of the device.
        limit: u32,
        /// `CUdevWorkqueueConfigScope`.
        scope: u32,
    },
    /// Those of an existing context: of the primary one of a device, or of a green context.
    Of(Origin),
}

/// The resources of a green context, or a path alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceDescription {
    /// The multiprocessors.
    pub path: SmPath,
    /// More groups of the last split of the path.
    pub more: Vec<Pick>,
    /// The work queues.
    pub queues: QueueChoice,
}

/// Bytes that are no description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these bytes describe no resources")]
pub struct Malformed;

impl From<SmPath> for ResourceDescription {
    fn from(path: SmPath) -> ResourceDescription {
        ResourceDescription { path, more: Vec::new(), queues: QueueChoice::Any }
    }
}

const DEVICE: u64 = 0;
const GREEN: u64 = 1;
const REMAINDER: u64 = u32::MAX as u64;
const BY_COUNT: u64 = 0;
const GROUPS: u64 = 1;
const DISCOVERY: u64 = 2;
const ANY_QUEUES: u64 = 0;
const CONFIG: u64 = 1;
const OF: u64 = 2;

struct Encoder(Vec<u8>);

impl Encoder {
    fn word(&mut self, word: u64) {
        self.0.extend(word.to_le_bytes());
    }

    fn words(&mut self, words: impl IntoIterator<Item = u64>) {
        words.into_iter().for_each(|word| self.word(word));
    }

    fn origin(&mut self, origin: Origin) {
        match origin {
            Origin::Device(device) => self.words([DEVICE, u64::from(device.0)]),
            Origin::Green(green) => self.words([GREEN, green.raw()]),
        }
    }

    fn pick(&mut self, pick: Pick) {
        self.word(match pick {
            Pick::Group(index) => u64::from(index),
            Pick::Remainder => REMAINDER,
        });
    }

    fn groups(&mut self, kind: u64, groups: &[SmGroup]) {
        self.words([kind, groups.len() as u64]);
        for group in groups {
            let SmGroup { count, coscheduled, preferred, flags, domain } = *group;
            // Two fields in a word.
            let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            self.words([pair(count, coscheduled), pair(preferred, flags), u64::from(domain)]);
        }
    }
}

impl ResourceDescription {
    /// The bytes; `None` if they are more than may cross.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let ResourceDescription { path, more, queues } = self;
        if path.splits.len() > SM_SPLITS || more.len() > SM_GROUPS {
            return None;
        }
        let mut encoder = Encoder(Vec::new());
        encoder.origin(path.origin);
        encoder.word(path.splits.len() as u64);
        for (split, pick) in &path.splits {
            match split {
                SmSplit::ByCount { groups, minimum, flags } => {
                    encoder.words([BY_COUNT, u64::from(*groups), u64::from(*minimum), u64::from(*flags)]);
                }
                SmSplit::Groups(groups) => encoder.groups(GROUPS, groups),
                SmSplit::Discovery(groups) => encoder.groups(DISCOVERY, groups),
            }
            encoder.pick(*pick);
        }
        encoder.word(more.len() as u64);
        more.iter().for_each(|pick| encoder.pick(*pick));
        match *queues {
            QueueChoice::Any => encoder.word(ANY_QUEUES),
            QueueChoice::Config { limit, scope } => {
                encoder.words([CONFIG, u64::from(limit), u64::from(scope)])
            }
            QueueChoice::Of(origin) => {
                encoder.word(OF);
                encoder.origin(origin);
            }
        }
        (encoder.0.len() <= DESCRIPTION_BYTES).then_some(encoder.0)
    }

    /// The description that [`ResourceDescription::encode`] made.
    ///
    /// # Errors
    /// [`Malformed`] for other bytes, and for more splits or groups than may cross.
    pub fn decode(bytes: &[u8]) -> Result<ResourceDescription, Malformed> {
        let mut decoder = Decoder(bytes);
        let origin = decoder.origin()?;
        let splits = decoder.count(SM_SPLITS)?;
        let splits =
            (0..splits).map(|_| Ok((decoder.split()?, decoder.pick()?))).collect::<Result<_, _>>()?;
        let more = decoder.count(SM_GROUPS)?;
        let more = (0..more).map(|_| decoder.pick()).collect::<Result<_, _>>()?;
        let queues = match decoder.word()? {
            ANY_QUEUES => QueueChoice::Any,
            CONFIG => QueueChoice::Config { limit: decoder.half()?, scope: decoder.half()? },
            OF => QueueChoice::Of(decoder.origin()?),
            _ => return Err(Malformed),
        };
        if !decoder.0.is_empty() {
            return Err(Malformed);
        }
        Ok(ResourceDescription { path: SmPath { origin, splits }, more, queues })
    }
}

struct Decoder<'a>(&'a [u8]);

impl Decoder<'_> {
    fn word(&mut self) -> Result<u64, Malformed> {
        let (word, left) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = left;
        Ok(u64::from_le_bytes(*word))
    }

    fn half(&mut self) -> Result<u32, Malformed> {
        u32::try_from(self.word()?).map_err(|_| Malformed)
    }

    fn count(&mut self, most: usize) -> Result<usize, Malformed> {
        usize::try_from(self.word()?).ok().filter(|count| *count <= most).ok_or(Malformed)
    }

    fn origin(&mut self) -> Result<Origin, Malformed> {
        match self.word()? {
            DEVICE => Ok(Origin::Device(Ordinal(self.half()?))),
            GREEN => Id::from_raw(self.word()?).map(Origin::Green).ok_or(Malformed),
            _ => Err(Malformed),
        }
    }

    fn pick(&mut self) -> Result<Pick, Malformed> {
        match self.half()? {
            u32::MAX => Ok(Pick::Remainder),
            index if (index as usize) < SM_GROUPS => Ok(Pick::Group(index)),
            _ => Err(Malformed),
        }
    }

    fn split(&mut self) -> Result<SmSplit, Malformed> {
        Ok(match self.word()? {
            BY_COUNT => {
                let groups = self.half()?;
                if groups as usize > SM_GROUPS {
                    return Err(Malformed);
                }
                SmSplit::ByCount { groups, minimum: self.half()?, flags: self.half()? }
            }
            GROUPS => SmSplit::Groups(self.groups()?),
            DISCOVERY => SmSplit::Discovery(self.groups()?),
            _ => return Err(Malformed),
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
    fn groups(&mut self) -> Result<Vec<SmGroup>, Malformed> {
        let count = self.count(SM_GROUPS)?;
        (0..count)
            .map(|_| {
                let (first, second) = (self.word()?, self.word()?);
                Ok(SmGroup {
                    count: first as u32,
                    coscheduled: (first >> 32) as u32,
                    preferred: second as u32,
                    flags: (second >> 32) as u32,
                    domain: self.half()?,
                })
            })
            .collect()
    }
}

/// Groups of multiprocessors: the fields of `CUdevSmResource` of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmResults {
    count: usize,
    groups: [[u32; 5]; SM_GROUPS],
    /// The multiprocessors that are left over; all 0 if none are.
    pub remainder: [u32; 5],
}

impl SmResults {
    /// Results of a split; `None` if they are more than may cross.
    #[must_use]
    pub fn new(groups: &[[u32; 5]], remainder: [u32; 5]) -> Option<SmResults> {
        let mut results = SmResults { count: groups.len(), groups: [[0; 5]; SM_GROUPS], remainder };
        results.groups.get_mut(..groups.len())?.copy_from_slice(groups);
        Some(results)
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[[u32; 5]] {
        self.groups.get(..self.count).unwrap_or_default()
    }
}

impl<'a> Field<'a> for SmResults {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(self.count as u64)?;
        let all = [self.remainder];
        let words = all.iter().chain(self.groups()).flatten();
        writer.bytes(&words.flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
    }

    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let count = usize::try_from(reader.word()?).ok().filter(|count| *count <= SM_GROUPS);
        let count = count.ok_or(FieldError::Range)?;
        // The count is below the limit.
        let bytes = reader.bytes(count.saturating_add(1).saturating_mul(GROUP_BYTES))?;
        let (words, _) = bytes.as_chunks::<4>();
        let mut groups = words.as_chunks::<5>().0.iter().map(|group| group.map(u32::from_le_bytes));
        let remainder = groups.next().ok_or(FieldError::Short)?;
        SmResults::new(&groups.collect::<Vec<_>>(), remainder).ok_or(FieldError::Range)
    }
}
