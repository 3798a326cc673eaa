//! The objects of the plain kinds: a handle of the driver for each id.

use crate::session::{
    objects::{ContextRef, GuestObject},
    table::Table,
};
use sluice_driver::{Code, Handle, code};
use sluice_protocol::{
    field::{Mint, Take},
    handle::{self, Kind},
};

macro_rules! plain {
    ($($(#[$doc:meta])* $kind:ident = $tag:literal, $limit:expr;)*) => {
        /// The tables of all plain kinds.
        #[derive(Debug, Default)]
        #[allow(non_snake_case, reason = "the names of the kinds")]
        pub(crate) struct PlainObjects {
            $(pub(crate) $kind: Table<handle::$kind, GuestObject>,)*
        }

        impl PlainObjects {
            /// Removes the objects of a context that is being destroyed.
            pub(crate) fn forget(&mut self, context: ContextRef) {
                $(self.$kind.forget(|object| object.context == Some(context));)*
            }
        }
    };
}
sluice_protocol::for_each_plain_kind!(plain);

impl<K: Kind> Table<K, GuestObject> {
    /// Makes an object of the driver for a free id.
    pub(crate) fn make(
        &mut self,
        Mint(id): Mint<K>,
        context: Option<ContextRef>,
        make: impl FnOnce() -> Result<Handle, Code>,
    ) -> Result<(), Code> {
        if !self.is_free(id) {
            return Err(code::INVALID_VALUE);
        }
        let handle = make()?;
        self.insert(id, GuestObject { handle, context })
    }

    /// Removes the object of an id.
    pub(crate) fn take(&mut self, Take(id): Take<K>) -> Result<Handle, Code> {
        self.remove(id).map(|object| object.handle).ok_or(code::INVALID_HANDLE)
    }
}
