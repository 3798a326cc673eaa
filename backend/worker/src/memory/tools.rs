//! The state that the memory helper and the module helper share.

use crate::{
    helper::{Helper, notice::Notices},
    memory::{heaps::Heaps, memory_source::MemorySource},
    session::Session,
};
use sluice_driver::Driver;
use std::sync::Arc;

/// A copy for each of the two threads.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    pub(crate) driver: Arc<Driver>,
    pub(crate) session: Arc<Session>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) helper: Helper,
    pub(crate) memory_source: MemorySource,
    pub(crate) heaps: Arc<Heaps>,
}
