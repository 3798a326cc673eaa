//! Sessions of a driver without contexts: the open control resources, and the mark that ties other resources to them.
//!
//! The guest's kernel reports which resource is transferred, and so which session rings. It does not report the maker of a
//! resource: the session's nonce in the resource's first page shows that.

use sluice_protocol::session::Nonce;
use std::collections::HashMap;

/// The state of one control resource.
#[derive(Clone, Copy, Debug)]
struct Control {
    session: u32,
    nonce: Nonce,
}

/// All open control resources of a device, one per session.
#[derive(Debug, Default)]
pub struct Controls {
    table: HashMap<u32, Control>,
    /// Control resources by their nonces' keys.
    keys: HashMap<u64, u32>,
}

impl Controls {
    /// Adds a session. Returns false if another session has this nonce, or one with the same key.
    pub fn insert(&mut self, resource: u32, session: u32, nonce: Nonce) -> bool {
        if self.is_known(nonce) || self.table.contains_key(&resource) {
            return false;
        }
        self.keys.insert(nonce.key(), resource);
        self.table.insert(resource, Control { session, nonce });
        true
    }

    /// True if a session has this nonce, or one with the same key.
    #[must_use]
    pub fn is_known(&self, nonce: Nonce) -> bool {
        self.keys.contains_key(&nonce.key())
    }

    /// The session of a control resource.
    #[must_use]
    pub fn session(&self, resource: u32) -> Option<u32> {
        self.table.get(&resource).map(|control| control.session)
    }

    /// The nonce of the session of a control resource.
    #[must_use]
    pub fn nonce(&self, resource: u32) -> Option<Nonce> {
        self.table.get(&resource).map(|control| control.nonce)
    }

    /// The session that a token names.
    #[must_use]
    pub fn by_key(&self, key: u64) -> Option<u32> {
        self.session(*self.keys.get(&key)?)
    }

    /// Removes a session and returns it.
    pub fn remove(&mut self, resource: u32) -> Option<u32> {
        let control = self.table.remove(&resource)?;
        self.keys.remove(&control.nonce.key());
        Some(control.session)
    }

    /// Number of sessions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there are no sessions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Removes all sessions.
    pub fn clear(&mut self) {
        self.table.clear();
        self.keys.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::*;

    fn nonce(first: u8, last: u8) -> Nonce {
        let mut bytes = [0; Nonce::BYTES];
        (bytes[0], bytes[15]) = (first, last);
        Nonce::new(bytes).unwrap()
    }

    // Promise: V16
    #[test]
    fn nonce_in_use_is_refused_to_a_second_session() {
        let mut controls = Controls::default();
        assert!(controls.insert(10, 1, nonce(1, 0)));
        assert!(!controls.insert(11, 2, nonce(1, 0)), "replayed");
        assert!(!controls.insert(11, 2, nonce(1, 9)), "tokens could not tell them apart");
        assert!(!controls.insert(10, 2, nonce(2, 0)), "one session per control resource");
        assert!(controls.insert(11, 2, nonce(2, 0)));
        assert_eq!((controls.session(10), controls.by_key(nonce(2, 0).key())), (Some(1), Some(2)));
        assert_eq!(controls.remove(10), Some(1));
        assert_eq!((controls.session(10), controls.by_key(nonce(1, 0).key())), (None, None));
        assert_eq!(controls.remove(10), None);
        assert!(controls.insert(12, 3, nonce(1, 9)));
        controls.clear();
        assert!(controls.is_empty() && controls.by_key(nonce(1, 9).key()).is_none());
    }
}
