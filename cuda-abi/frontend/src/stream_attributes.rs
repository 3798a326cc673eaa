//! The attributes of streams (`cuStreamSetAttribute`): their ids, their values before a program sets them, and those that it has set.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a `CUstreamAttrValue`.
pub const BYTES: usize = 64;

/// `CUstreamAttrID`s.
const ACCESS_POLICY_WINDOW: u32 = 1;
const SYNCHRONIZATION_POLICY: u32 = 3;
const PRIORITY: u32 = 8;
const MEMORY_DOMAIN_MAP: u32 = 9;
const MEMORY_DOMAIN: u32 = 10;

/// The greatest `CUsynchronizationPolicy` and `CUlaunchMemSyncDomain`.
const GREATEST_POLICY: u32 = 4;
const GREATEST_DOMAIN: u32 = 1;

/// The values that were set, by stream and attribute. The library has looked the stream up before it calls.
#[derive(Debug, Default)]
pub struct StreamAttributes(Mutex<BTreeMap<(u64, u32), [u8; BYTES]>>);

/// True for attributes that say how the host waits, and so never reach a device.
#[must_use]
pub const fn is_of_host(attribute: u32) -> bool {
    attribute == SYNCHRONIZATION_POLICY
}

/// The priority in a value, if the attribute is the priority.
#[must_use]
pub fn priority(attribute: u32, value: &[u8; BYTES]) -> Option<i32> {
    (attribute == PRIORITY).then(|| word(value, 0).cast_signed())
}

fn word(value: &[u8; BYTES], index: usize) -> u32 {
    let mut word = [0; 4];
    let bytes = value.iter().skip(index * 4);
    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u32::from_ne_bytes(word)
}

fn with_first(value: u32) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..4].copy_from_slice(&value.to_ne_bytes());
    bytes
}

/// Checks a value that a program sets.
///
/// # Errors
/// `invalid` for an attribute that streams do not have, and for a value that the header does not allow.
pub fn check<E>(attribute: u32, value: &[u8; BYTES], invalid: E) -> Result<(), E> {
    let valid = match attribute {
        // A window: its address, its bytes, the share of hits, and two properties.
        ACCESS_POLICY_WINDOW => {
            let ratio = f32::from_bits(word(value, 4));
            (0.0..=1.0).contains(&ratio) && word(value, 5) <= 2 && word(value, 6) <= 1
        }
        SYNCHRONIZATION_POLICY => (1..=GREATEST_POLICY).contains(&word(value, 0)),
        PRIORITY => true,
        MEMORY_DOMAIN_MAP => value.iter().take(2).all(|domain| u32::from(*domain) <= GREATEST_DOMAIN),
        MEMORY_DOMAIN => word(value, 0) <= GREATEST_DOMAIN,
        _ => false,
    };
    if valid { Ok(()) } else { Err(invalid) }
}

impl StreamAttributes {
    /// No values.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, u32), [u8; BYTES]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a value that was checked and applied.
    pub fn set(&self, stream: u64, attribute: u32, value: [u8; BYTES]) {
        self.lock().insert((stream, attribute), value);
    }

    /// The value of an attribute; `priority` is that of the stream when it was made.
    ///
    /// # Errors
    /// `invalid` for an attribute that streams do not have.
    pub fn get<E>(&self, stream: u64, attribute: u32, priority: i32, invalid: E) -> Result<[u8; BYTES], E> {
        if let Some(value) = self.lock().get(&(stream, attribute)) {
            return Ok(*value);
        }
        match attribute {
            ACCESS_POLICY_WINDOW | MEMORY_DOMAIN => Ok([0; BYTES]),
            SYNCHRONIZATION_POLICY => Ok(with_first(1)),
            PRIORITY => Ok(with_first(priority.cast_unsigned())),
            // The domain of local memory is 0, that of remote memory 1.
            MEMORY_DOMAIN_MAP => Ok(with_first(u32::from_ne_bytes([0, 1, 0, 0]))),
            _ => Err(invalid),
        }
    }

    /// The values that were set for a stream.
    pub fn of(&self, stream: u64) -> Vec<(u32, [u8; BYTES])> {
        let values = self.lock();
        values.range((stream, 0)..=(stream, u32::MAX)).map(|((_, id), value)| (*id, *value)).collect()
    }

    /// Forgets a stream that ends.
    pub fn forget(&self, stream: u64) {
        self.lock().retain(|(of, _), _| *of != stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_has_its_value_before_it_is_set_and_after_and_none_when_the_stream_is_forgotten() {
        let attributes = StreamAttributes::new();
        let get = |stream, id| attributes.get(stream, id, -3, "no").map(|value| word(&value, 0));
        assert_eq!(get(7, SYNCHRONIZATION_POLICY), Ok(1));
        assert_eq!(get(7, PRIORITY).map(u32::cast_signed), Ok(-3));
        assert_eq!(get(7, MEMORY_DOMAIN_MAP), Ok(0x100));
        assert_eq!(get(7, 2), Err("no"), "cooperative launches are no attribute of streams");
        attributes.set(7, MEMORY_DOMAIN, with_first(1));
        assert_eq!(get(7, MEMORY_DOMAIN), Ok(1));
        assert_eq!(get(8, MEMORY_DOMAIN), Ok(0), "another stream");
        assert_eq!(attributes.of(7), [(MEMORY_DOMAIN, with_first(1))]);
        attributes.forget(7);
        assert_eq!(get(7, MEMORY_DOMAIN), Ok(0));
    }

    #[test]
    fn value_that_the_header_does_not_allow_is_refused() {
        let check = |id, value| check(id, &value, ());
        assert!(check(SYNCHRONIZATION_POLICY, with_first(0)).is_err());
        assert!(check(SYNCHRONIZATION_POLICY, with_first(4)).is_ok());
        assert!(check(MEMORY_DOMAIN, with_first(2)).is_err());
        assert!(check(MEMORY_DOMAIN_MAP, with_first(0x0201)).is_err());
        assert!(check(0, with_first(0)).is_err());
        assert!(check(4, with_first(1)).is_err(), "the clusters of a launch");
        let mut window = [0; BYTES];
        window[16..20].copy_from_slice(&1.5_f32.to_ne_bytes());
        assert!(check(ACCESS_POLICY_WINDOW, window).is_err());
        window[16..20].copy_from_slice(&0.5_f32.to_ne_bytes());
        assert!(check(ACCESS_POLICY_WINDOW, window).is_ok());
    }
}
