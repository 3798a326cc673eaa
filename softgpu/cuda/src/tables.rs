//! This driver's functions behind the export tables.

use sluice_cuda_abi::symbols::CUDA_VERSION;
use sluice_cuda_frontend::In;
use sluice_cuda_frontend::tables::{self, DeviceIdentity, Hooks};

use crate::context::{self, CONTEXTS};
use crate::error::code;
use crate::log::log;
use crate::stream::{self, Implicit};
use crate::{module, process};

struct Answers;

static ANSWERS: Answers = Answers;

/// Connects the tables to this driver.
pub(crate) fn install() {
    tables::install(&ANSWERS);
}

/// Converts a handle to the form of the tables.
fn number(handle: u64) -> usize {
    usize::try_from(handle).unwrap_or(0)
}

impl Hooks for Answers {
    fn ready(&self) -> Result<(), u32> {
        process::driver().map(|_| ()).map_err(|error| code(Err(error)))
    }

    fn primary_context(&self, device: i32) -> Result<usize, u32> {
        let primary = process::driver().and_then(|driver| driver.primary(device)).map_err(|error| error.0)?;
        Ok(number(primary.context.handle))
    }

    fn current_context(&self) -> usize {
        context::current().ok().flatten().map_or(0, |context| number(context.handle))
    }

    fn context_id(&self, context: usize) -> Result<u64, u32> {
        let context = CONTEXTS.get(context as u64).map_err(|error| error.0)?;
        Ok(context.core().map_err(|error| error.0)?.id)
    }

    fn stream_id(&self, stream: u64) -> Result<u64, u32> {
        Ok(stream::target(stream, Implicit::Legacy).map_err(|error| error.0)?.id)
    }

    fn load_module(&self, image: In<u8, u32>) -> Result<usize, u32> {
        module::load_plain(image.with_errors()).map(number).map_err(|error| code(Err(error)))
    }

    fn functions(&self, module: usize) -> Result<Vec<usize>, u32> {
        let functions = module::functions(module as u64).map_err(|error| code(Err(error)))?;
        Ok(functions.into_iter().map(number).collect())
    }

    fn devices(&self) -> &[DeviceIdentity] {
        process::driver().map_or(&[], |driver| &driver.identities)
    }

    fn driver_version(&self) -> u32 {
        CUDA_VERSION
    }

    fn refused(&self, uuid: [u8; 16]) {
        log!("export table {uuid:02x?} is not supported");
    }

    fn unsupported(&self, uuid: [u8; 16], slot: usize) {
        log!("slot {slot} of export table {uuid:02x?} is not supported");
    }
}
