//! Green contexts, and the resources from which they are made.
//!
//! A green context is a part of a primary context: its streams run on some of the device's multiprocessors, and everything else is the
//! primary context's. As a context it has a handle of its own, its view. A resource that a program holds names its place here, never
//! bytes of a driver; a forged one names nothing, or another part of the same devices.

use crate::error::{Error, Result};
use core::sync::atomic::{AtomicBool, Ordering};
use sluice_cuda_abi::resources::{DevResource, SmFields, kind};
use sluice_protocol::{
    field::Ordinal,
    handle::{GREEN_VIEW, GreenContext as Kind, Id, Kind as _, RESOURCE_DESCRIPTOR},
    resources::{Origin, Pick, QueueChoice, ResourceDescription, SmPath, SmSplit},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

/// The first private word of a resource.
const MARK: u32 = 0x736c_7569;
/// The private word of the rest of a split.
const REMAINDER: u32 = u32::MAX;
/// Different splits and queues that a process may have.
const KNOWN: usize = 1 << 14;

/// A green context.
#[derive(Debug)]
pub(crate) struct Green {
    pub(crate) id: Id<Kind>,
    /// Raw id of its primary context.
    pub(crate) primary: u64,
    pub(crate) device: i32,
    /// Stream slot of its default stream, if it has one.
    pub(crate) default: Option<u32>,
    pub(crate) queues: QueueWish,
    gone: AtomicBool,
}

/// Work queues as a program wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueWish {
    pub(crate) limit: u32,
    pub(crate) scope: u32,
}

impl Green {
    pub(crate) fn new(id: Id<Kind>, primary: u64, descriptor: &Descriptor, default: Option<u32>) -> Green {
        let Descriptor { device, queues, .. } = *descriptor;
        Green { id, primary, device, default, queues, gone: AtomicBool::new(false) }
    }

    /// Its handle as a context.
    pub(crate) fn view(&self) -> u64 {
        view(self.id.raw())
    }

    /// Takes it out of use; `false` if another thread did so.
    pub(crate) fn end(&self) -> bool {
        !self.gone.swap(true, Ordering::AcqRel)
    }
}

/// The handle as a context of a green context's raw id.
pub(crate) fn view(green: u64) -> u64 {
    with_tag(green, GREEN_VIEW)
}

/// True for the handle of a green context as a context.
pub(crate) fn is_view(context: u64) -> bool {
    context >> 56 == u64::from(GREEN_VIEW)
}

fn with_tag(raw: u64, tag: u8) -> u64 {
    raw & !(0xff << 56) | u64::from(tag) << 56
}

/// The green contexts of the session, by raw id.
#[derive(Debug, Default)]
pub(crate) struct Greens {
    live: RwLock<BTreeMap<u64, Arc<Green>>>,
}

impl Greens {
    /// The green context of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<Green>> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        live.get(&handle).cloned().ok_or(Error::INVALID_CONTEXT)
    }

    /// The green context of a handle as a context.
    #[cold]
    pub(crate) fn of_view(&self, view: u64) -> Result<Arc<Green>> {
        self.get(with_tag(view, Kind::TAG))
    }

    pub(crate) fn insert(&self, green: Green) {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        live.insert(green.id.raw(), Arc::new(green));
    }

    pub(crate) fn remove(&self, green: &Green) {
        self.live.write().unwrap_or_else(PoisonError::into_inner).remove(&green.id.raw());
    }

    /// The green contexts of a primary context.
    pub(crate) fn of_primary(&self, primary: u64) -> Vec<Arc<Green>> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        live.values().filter(|green| green.primary == primary).cloned().collect()
    }
}

/// Multiprocessors before the last choice of a group.
#[derive(Clone, Debug)]
struct KnownSplit {
    origin: Origin,
    device: i32,
    before: Vec<(SmSplit, Pick)>,
    /// The last split and the number of its groups; `None` for all multiprocessors of the origin.
    last: Option<(SmSplit, u32)>,
}

/// The queues of an existing context.
#[derive(Clone, Copy, Debug)]
struct KnownQueues {
    origin: Origin,
    device: i32,
    wish: QueueWish,
}

#[derive(Clone, Debug)]
enum KnownResource {
    Split(KnownSplit),
    Queues(KnownQueues),
}

impl KnownResource {
    fn origin(&self) -> Origin {
        match self {
            KnownResource::Split(split) => split.origin,
            KnownResource::Queues(queues) => queues.origin,
        }
    }
}

/// Multiprocessors that a resource names.
#[derive(Clone, Debug)]
pub(crate) struct KnownPath {
    pub(crate) device: i32,
    pub(crate) path: SmPath,
}

/// A descriptor of resources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    /// The worker's number of it.
    number: u32,
    pub(crate) device: i32,
    queues: QueueWish,
}

impl Descriptor {
    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

/// The resources that programs hold.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    state: Mutex<ResourceState>,
}

#[derive(Debug, Default)]
struct ResourceState {
    known: BTreeMap<u64, KnownResource>,
    /// The numbers of the same, by the bytes of their paths.
    numbers: BTreeMap<Vec<u8>, u64>,
    last: u64,
    /// The descriptors by the worker's number.
    descriptors: BTreeMap<u32, Descriptor>,
}

impl ResourceState {
    /// The number of a split or of queues.
    fn number(&mut self, name: Vec<u8>, known: impl FnOnce() -> KnownResource) -> Result<u64> {
        if let Some(number) = self.numbers.get(&name) {
            return Ok(*number);
        }
        if self.known.len() >= KNOWN {
            return Err(Error::OUT_OF_MEMORY);
        }
        self.last += 1;
        self.known.insert(self.last, known());
        self.numbers.insert(name, self.last);
        Ok(self.last)
    }

    fn of(&self, resource: &DevResource) -> Result<(&KnownResource, u32)> {
        let [mark, low, high, pick, ..] = resource.private;
        let known = self.known.get(&(u64::from(low) | u64::from(high) << 32));
        Ok((known.filter(|_| mark == MARK).ok_or(Error::INVALID_VALUE)?, pick))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a number")]
fn private(number: u64, pick: u32) -> [u32; 4] {
    [MARK, number as u32, (number >> 32) as u32, pick]
}

fn sm_resource(number: u64, pick: u32, fields: SmFields) -> DevResource {
    DevResource::new(kind::SM, &private(number, pick), &fields.words())
}

/// A wish about the queues of a device.
pub(crate) fn queue_config(device: i32, wish: QueueWish) -> DevResource {
    DevResource::new(kind::WORKQUEUE_CONFIG, &[], &[device.cast_unsigned(), wish.limit, wish.scope])
}

impl Resources {
    fn lock(&self) -> MutexGuard<'_, ResourceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All multiprocessors of an origin.
    pub(crate) fn whole(&self, origin: Origin, device: i32, fields: SmFields) -> Result<DevResource> {
        let path = SmPath { origin, splits: Vec::new() };
        let name = ResourceDescription::from(path).encode().ok_or(Error::UNKNOWN)?;
        let split = || KnownResource::Split(KnownSplit { origin, device, before: Vec::new(), last: None });
        Ok(sm_resource(self.lock().number(name, split)?, 0, fields))
    }

    /// The results of a split of these multiprocessors: the groups, and the rest if there is one.
    pub(crate) fn parts(
        &self,
        of: &KnownPath,
        how: &SmSplit,
        groups: &[[u32; 5]],
        remainder: [u32; 5],
    ) -> Result<(Vec<DevResource>, DevResource)> {
        let KnownPath { device, path: SmPath { origin, splits } } = of;
        let mut path = of.path.clone();
        path.splits.push((how.clone(), Pick::Remainder));
        let name = ResourceDescription::from(path).encode().ok_or(Error::INVALID_RESOURCE_CONFIGURATION)?;
        let count = u32::try_from(groups.len()).map_err(|_| Error::UNKNOWN)?;
        let last = || Some((how.clone(), count));
        let split = || {
            KnownResource::Split(KnownSplit {
                origin: *origin,
                device: *device,
                before: splits.clone(),
                last: last(),
            })
        };
        let number = self.lock().number(name, split)?;
        let group =
            |(index, words): (u32, &[u32; 5])| sm_resource(number, index, SmFields::from_words(*words));
        let left = SmFields::from_words(remainder);
        let left = if left.count == 0 { DevResource::INVALID } else { sm_resource(number, REMAINDER, left) };
        Ok(((0..).zip(groups).map(group).collect(), left))
    }

    /// The queues of an existing context.
    pub(crate) fn queues(&self, origin: Origin, device: i32, wish: QueueWish) -> Result<DevResource> {
        let path = SmPath { origin, splits: Vec::new() };
        let description =
            ResourceDescription { queues: QueueChoice::Of(origin), ..ResourceDescription::from(path) };
        let name = description.encode().ok_or(Error::UNKNOWN)?;
        let number =
            self.lock().number(name, || KnownResource::Queues(KnownQueues { origin, device, wish }))?;
        Ok(DevResource::new(kind::WORKQUEUE, &private(number, 0), &[]))
    }

    /// The multiprocessors of a resource.
    pub(crate) fn path(&self, resource: &DevResource) -> Result<KnownPath> {
        if resource.kind != kind::SM {
            return Err(Error::INVALID_RESOURCE_TYPE);
        }
        let state = self.lock();
        let (KnownResource::Split(split), pick) = state.of(resource)? else {
            return Err(Error::INVALID_VALUE);
        };
        let KnownSplit { origin, device, before, last } = split.clone();
        let mut splits = before;
        match (last, pick) {
            (None, 0) => {}
            (Some((how, _)), REMAINDER) => splits.push((how, Pick::Remainder)),
            (Some((how, groups)), index) if index < groups => splits.push((how, Pick::Group(index))),
            _ => return Err(Error::INVALID_VALUE),
        }
        Ok(KnownPath { device, path: SmPath { origin, splits } })
    }

    /// The origin of existing queues, their device, and the wish with which they were made.
    pub(crate) fn queues_of(&self, resource: &DevResource) -> Result<(Origin, i32, QueueWish)> {
        let state = self.lock();
        match state.of(resource)? {
            (KnownResource::Queues(KnownQueues { origin, device, wish }), 0) => Ok((*origin, *device, *wish)),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Remembers a descriptor of the worker. Returns its handle.
    pub(crate) fn described(&self, number: u32, device: i32, queues: QueueWish) -> u64 {
        self.lock().descriptors.insert(number, Descriptor { number, device, queues });
        with_tag(u64::from(number) + 1, RESOURCE_DESCRIPTOR)
    }

    /// The descriptor of a handle.
    pub(crate) fn descriptor(&self, handle: u64) -> Result<Descriptor> {
        let number = (handle >> 56 == u64::from(RESOURCE_DESCRIPTOR)).then(|| with_tag(handle, 0));
        let number = number.and_then(|number| u32::try_from(number.checked_sub(1)?).ok());
        let state = self.lock();
        number.and_then(|number| state.descriptors.get(&number)).copied().ok_or(Error::INVALID_VALUE)
    }

    /// Forgets the resources of a green context that is gone.
    pub(crate) fn forget(&self, green: Id<Kind>) {
        let mut state = self.lock();
        state.known.retain(|_, known| known.origin() != Origin::Green(green));
        let ResourceState { known, numbers, .. } = &mut *state;
        numbers.retain(|_, number| known.contains_key(number));
    }
}

/// The multiprocessors of a device.
pub(crate) const fn of_device(ordinal: u32) -> Origin {
    Origin::Device(Ordinal(ordinal))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(count: u32) -> [u32; 5] {
        [count, 8, 8, 0, 0]
    }

    fn split(resources: &Resources) -> (DevResource, Vec<DevResource>, DevResource) {
        let whole = resources.whole(of_device(0), 3, SmFields::from_words(fields(132))).unwrap();
        let how = SmSplit::ByCount { groups: 2, minimum: 8, flags: 0 };
        let path = resources.path(&whole).unwrap();
        let (groups, left) = resources.parts(&path, &how, &[fields(8); 2], fields(116)).unwrap();
        (whole, groups, left)
    }

    #[test]
    fn resource_leads_back_to_its_split() {
        let resources = Resources::default();
        let (whole, groups, left) = split(&resources);
        let picks = |resource: &DevResource| {
            let KnownPath { device, path } = resources.path(resource).unwrap();
            assert_eq!((device, path.origin), (3, of_device(0)));
            path.splits.iter().map(|(_, pick)| *pick).collect::<Vec<_>>()
        };
        assert_eq!(picks(&whole), []);
        assert_eq!(picks(&groups[1]), [Pick::Group(1)]);
        assert_eq!(picks(&left), [Pick::Remainder]);
        let again = split(&resources);
        assert_eq!(again, (whole, groups, left), "the same split takes no more memory");
        assert_eq!(resources.lock().known.len(), 2);
    }

    // Promise: C106
    #[test]
    fn forged_resource_names_nothing() {
        let resources = Resources::default();
        let (_, groups, _) = split(&resources);
        let forged = |change: fn(&mut DevResource)| {
            let mut resource = groups[0];
            change(&mut resource);
            resources.path(&resource).err()
        };
        assert_eq!(forged(|_| ()), None);
        assert_eq!(forged(|resource| resource.kind = kind::WORKQUEUE), Some(Error::INVALID_RESOURCE_TYPE));
        assert_eq!(forged(|resource| resource.kind = kind::INVALID), Some(Error::INVALID_RESOURCE_TYPE));
        for change in [
            (|resource: &mut DevResource| resource.private[0] ^= 1) as fn(&mut DevResource),
            |resource| resource.private[1] = u32::MAX,
            |resource| resource.private[2] = 1,
            |resource| resource.private[3] = 2,
            |resource| resource.private = [0; 23],
        ] {
            assert_eq!(forged(change), Some(Error::INVALID_VALUE));
        }
        let queues = resources.queues(of_device(0), 3, QueueWish { limit: 8, scope: 0 }).unwrap();
        assert_eq!(resources.queues_of(&queues).map(|(_, device, _)| device), Ok(3));
        assert!(resources.queues_of(&groups[0]).is_err());
        let mut disguised = queues;
        disguised.kind = kind::SM;
        assert_eq!(resources.path(&disguised).err(), Some(Error::INVALID_VALUE));
        for handle in [0, 1, u64::MAX, u64::from(RESOURCE_DESCRIPTOR) << 56] {
            assert_eq!(resources.descriptor(handle).err(), Some(Error::INVALID_VALUE));
        }
    }

    #[test]
    fn resources_end_with_their_green_context() {
        let resources = Resources::default();
        let green = Id::new(4, 1);
        let kept = split(&resources).0;
        let gone = resources.whole(Origin::Green(green), 3, SmFields::from_words(fields(8))).unwrap();
        resources.forget(green);
        assert_eq!(resources.path(&gone).err(), Some(Error::INVALID_VALUE));
        assert!(resources.path(&kept).is_ok());
    }
}
