//! The entry points for graphs. A graph has no nodes, since the functions that add one are not supported.

use crate::error::Error;
use crate::ffi::Out;
use crate::handles::{Kind, Registry};

static GRAPHS: Registry<()> = Registry::new(Kind::Graph, Error::INVALID_HANDLE);

calls! {
    fn cuGraphCreate(place: Out<u64>, flags: u32) {
        place.required()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        place.set(GRAPHS.insert_with(|_| ())?.0)
    }

    fn cuGraphDestroy(graph: u64) { GRAPHS.remove(graph).map(drop) }
}
