//! User objects.

use std::ffi::c_void;

use super::{Graphs, Out, Result, failed, invalid};
use crate::driver::GraphDriver;
use crate::objects::HostFunction;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which the header requires.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;

impl<D: GraphDriver> Graphs<D> {
    /// `cuUserObjectCreate`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn user_object_create(
        &self,
        place: Out<u64, D>,
        data: *mut c_void,
        destroy: Option<HostFunction>,
        references: u32,
        flags: u32,
    ) -> Result<(), D> {
        place.required()?;
        let destroy = destroy.filter(|_| flags == NO_DESTRUCTOR_SYNC).ok_or_else(invalid::<D>)?;
        place.set(self.objects.create(data, destroy, references).map_err(failed::<D>)?)
    }

    /// `cuUserObjectRetain`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn user_object_retain(&self, object: u64, count: u32) -> Result<(), D> {
        self.objects.retain(object, count).map_err(failed::<D>)
    }

    /// `cuUserObjectRelease`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn user_object_release(&self, object: u64, count: u32) -> Result<(), D> {
        self.objects.release(object, count).map_err(failed::<D>)
    }

    /// `cuGraphRetainUserObject`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_retain_user_object(&self, graph: u64, object: u64, count: u32, flags: u32) -> Result<(), D> {
        if flags > MOVE {
            return Err(invalid::<D>());
        }
        // Proves that the object exists and that the count is in range; a move needs no reference more.
        self.user_object_retain(object, count)?;
        let owned = self.with(|state| state.model.own_object(graph, object, count));
        if owned.is_err() || flags == MOVE {
            self.user_object_release(object, count)?;
        }
        owned
    }

    /// `cuGraphReleaseUserObject`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_release_user_object(&self, graph: u64, object: u64, count: u32) -> Result<(), D> {
        if count == 0 {
            return Err(invalid::<D>());
        }
        self.with(|state| state.model.disown_object(graph, object, count))?;
        self.user_object_release(object, count)
    }
}
