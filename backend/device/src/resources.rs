//! The resource table: guest memory objects, the contexts that may use them, and the answers that are withheld until no worker
//! has their pages.

use crate::{
    chain::Place,
    memory::{MemoryError, Run, Table},
};
use sluice_protocol::{
    gpu::{self, PAGE, Purpose},
    limits,
};
use std::collections::HashMap;

/// Contexts that may share one resource. A shared buffer of a guest desktop has two or three.
const SHARERS: usize = 16;
/// Commands about one resource that wait for a worker to let go; Linux sends one.
const WITHHELD: usize = 4;

/// Where a resource is mapped: in the worker of a session, as entry of its attach table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// The session.
    pub session: u32,
    /// The entry.
    pub slot: u32,
}

/// What a withheld command wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// RESOURCE_UNREF.
    Unref,
    /// RESOURCE_DETACH_BACKING.
    DetachBacking,
}

/// A command that is answered when no worker has the pages any more, for then the guest uses them for something else.
#[derive(Clone, Copy, Debug)]
pub struct Withheld {
    /// What it wants.
    pub wanted: Wanted,
    /// Its header, to echo.
    pub header: gpu::Header,
    /// Where its answer goes.
    pub place: Place,
}

/// One resource.
#[derive(Debug, Default)]
pub struct Resource {
    runs: Vec<Run>,
    contexts: Vec<u32>,
    /// What it is for, where the driver has no contexts.
    pub purpose: Purpose,
    /// The session it was found to be of, where the driver has no contexts. For good: what its pages carry from then on may
    /// be anybody's bytes.
    pub adopted: Option<u32>,
    /// The worker that has its pages.
    pub user: Option<User>,
    withheld: Vec<Withheld>,
}

impl Resource {
    /// Its pages; empty before it has memory.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.runs.iter().fold(0, |sum: u64, run| sum.saturating_add(run.count().saturating_mul(PAGE)))
    }

    /// Whether a context may use it.
    #[must_use]
    pub fn belongs_to(&self, context: u32) -> bool {
        self.contexts.contains(&context)
    }

    /// Whether the guest has asked for its pages.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        !self.withheld.is_empty()
    }
}

/// Why a command about a resource is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// The id is 0 or taken.
    #[error("resource id {0} is not free")]
    Id(u32),
    /// There is no such resource.
    #[error("no resource {0}")]
    Unknown(u32),
    /// There are too many, or it is shared too often.
    #[error("too many resources or sharers")]
    Many,
    /// It has memory already, or is about to lose it.
    #[error("resource {0} has memory already")]
    Backed(u32),
    /// Its pages are not acceptable.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// All resources of a device.
#[derive(Debug, Default)]
pub struct Resources {
    table: HashMap<u32, Resource>,
}

impl Resources {
    /// Number of resources.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// A resource.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`].
    pub fn get(&self, id: u32) -> Result<&Resource, ResourceError> {
        self.table.get(&id).ok_or(ResourceError::Unknown(id))
    }

    /// A resource, to change.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`].
    pub fn get_mut(&mut self, id: u32) -> Result<&mut Resource, ResourceError> {
        self.table.get_mut(&id).ok_or(ResourceError::Unknown(id))
    }

    /// A new resource without memory.
    ///
    /// # Errors
    /// [`ResourceError`] when the id is not free or there are too many.
    pub fn create(&mut self, id: u32) -> Result<(), ResourceError> {
        if id == 0 || self.table.contains_key(&id) {
            return Err(ResourceError::Id(id));
        }
        if self.table.len() >= limits::RESOURCES {
            return Err(ResourceError::Many);
        }
        self.table.insert(id, Resource::default());
        Ok(())
    }

    /// Gives a resource its memory.
    ///
    /// # Errors
    /// [`ResourceError`] when it has some, or the pages are not acceptable.
    pub fn attach_backing(
        &mut self,
        id: u32,
        memory: &mut Table,
        entries: impl Iterator<Item = (u64, u32)>,
    ) -> Result<(), ResourceError> {
        let resource = self.get_mut(id)?;
        if !resource.runs.is_empty() || resource.is_leaving() {
            return Err(ResourceError::Backed(id));
        }
        resource.runs = memory.claim(entries)?;
        Ok(())
    }

    /// A new resource with memory: both or neither.
    ///
    /// # Errors
    /// As for its two steps.
    pub fn create_blob(
        &mut self,
        id: u32,
        memory: &mut Table,
        entries: impl Iterator<Item = (u64, u32)>,
    ) -> Result<(), ResourceError> {
        self.create(id)?;
        self.attach_backing(id, memory, entries).inspect_err(|_| {
            self.table.remove(&id);
        })
    }

    /// Lets a context use a resource.
    ///
    /// # Errors
    /// [`ResourceError`] when there is none or it is shared too often.
    pub fn share(&mut self, id: u32, context: u32) -> Result<(), ResourceError> {
        let resource = self.get_mut(id)?;
        if !resource.belongs_to(context) {
            if resource.contexts.len() >= SHARERS {
                return Err(ResourceError::Many);
            }
            resource.contexts.push(context);
        }
        Ok(())
    }

    /// Ends a context's use of a resource and answers who has it mapped.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`].
    pub fn unshare(&mut self, id: u32, context: u32) -> Result<Option<User>, ResourceError> {
        let resource = self.get_mut(id)?;
        resource.contexts.retain(|sharer| *sharer != context);
        Ok(resource.user)
    }

    /// Ends a context's use of everything: its id will be given to somebody else.
    pub fn forget_context(&mut self, context: u32) {
        for resource in self.table.values_mut() {
            resource.contexts.retain(|sharer| *sharer != context);
        }
    }

    /// Takes the pages from a resource nobody has mapped, and the resource itself for UNREF. When a worker has it mapped
    /// the command is kept and the user answered.
    ///
    /// # Errors
    /// [`ResourceError`] when there is none, or too many such commands wait already.
    pub fn leave(
        &mut self,
        id: u32,
        memory: &mut Table,
        command: Withheld,
    ) -> Result<Option<User>, ResourceError> {
        let resource = self.get_mut(id)?;
        if resource.user.is_some() {
            if resource.withheld.len() >= WITHHELD {
                return Err(ResourceError::Many);
            }
            resource.withheld.push(command);
            return Ok(resource.user);
        }
        self.finish(id, memory, command.wanted);
        Ok(None)
    }

    fn finish(&mut self, id: u32, memory: &mut Table, wanted: Wanted) {
        if let Some(resource) = self.table.get_mut(&id) {
            memory.release(&core::mem::take(&mut resource.runs));
            if wanted == Wanted::Unref {
                self.table.remove(&id);
            }
        }
    }

    /// Its worker has let go of a resource: what waited for that is done and to be answered.
    pub fn released(&mut self, id: u32, memory: &mut Table) -> Vec<Withheld> {
        let Some(resource) = self.table.get_mut(&id) else { return Vec::new() };
        resource.user = None;
        let withheld = core::mem::take(&mut resource.withheld);
        for command in &withheld {
            self.finish(id, memory, command.wanted);
        }
        withheld
    }

    /// Moves all claims to a new memory table, and answers the resources whose pages are not the same any more; they
    /// have lost them.
    pub fn move_to(&mut self, old: &Table, new: &mut Table) -> Vec<u32> {
        let mut lost = Vec::new();
        for (id, resource) in &mut self.table {
            if !resource.runs.is_empty() && !new.adopt(old, &resource.runs) {
                resource.runs = Vec::new();
                lost.push(*id);
            }
        }
        lost
    }

    /// Number of commands that wait for workers to let go.
    #[must_use]
    pub fn withheld(&self) -> usize {
        self.table.values().fold(0, |sum, resource| sum.saturating_add(resource.withheld.len()))
    }

    /// Forgets everything: a new driver instance knows none of it.
    pub fn clear(&mut self, memory: &mut Table) {
        for resource in self.table.values() {
            memory.release(&resource.runs);
        }
        self.table.clear();
    }
}
