//! The objects of the plain kinds: a handle of the driver for each id.

use crate::session::{
    objects::{ContextRef, GuestObject},
    table::Table,
};
use sluice_protocol::handle;

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
