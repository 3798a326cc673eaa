//! The module helper's part of arrays, texture and surface objects, and references.
//!
//! The driver makes the memory of an array, so each has a grant. A driver may give out memory with bytes of another owner, so an array
//! is cleared when it is made; and it is cleared before it is destroyed, because its memory may serve another VM's driver next. Clearing is
//! work of the VM, in pieces: each waits for the permit and is charged.

use super::ModuleHelper;
use crate::{
    helper::{
        jobs::{ModuleCaller, ServeImages, module},
        kinds::ModuleRef,
    },
    memory::custody,
    session::{
        images::{GuestArray, GuestMipmapped, GuestReference},
        objects::{ContextRef, GuestImage},
        shape::ArrayShape,
    },
    submit::completion::Completion,
};
use sluice_cuda_abi::status;
use sluice_driver::{ArrayCopy, ArrayCopyEnd, ArrayExtent, Code, Driver, Handle, code};
use sluice_messages::custody::Growth;
use sluice_protocol::{calls::wire, limits};
use sluice_runtime::limited;
use std::collections::{HashMap, HashSet};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// Bytes of a piece of clearing. No device has arrays with longer rows.
const PIECE: u64 = 64 << 20;
/// Objects for which one grant suffices: the driver's descriptor of each has 64 bytes at most.
const OBJECTS_OF_GRANT: usize = 1024;

/// Device memory that the driver took for an array.
#[derive(Clone, Copy, Debug)]
struct ArrayMemory {
    context: ContextRef,
    device: i32,
    /// The bytes that were granted for it.
    bytes: u64,
    shape: ArrayShape,
}

/// Objects of one kind. A driver counts them context by context, so a number alone names none.
#[derive(Debug, Default)]
struct ImageObjects {
    /// The driver's numbers, with the serials of their contexts.
    live: HashSet<(u64, u64)>,
    /// For each context its objects, and those for which there are grants.
    counts: HashMap<u64, (usize, usize)>,
}

impl ImageObjects {
    fn forget(&mut self, context: ContextRef) {
        self.live.retain(|(serial, _)| *serial != context.serial);
        self.counts.remove(&context.serial);
    }
}

/// The arrays and objects of a session.
#[derive(Debug, Default)]
pub(super) struct SessionImages {
    arrays: HashMap<Handle, ArrayMemory>,
    mipmapped: HashMap<Handle, ArrayMemory>,
    textures: ImageObjects,
    surfaces: ImageObjects,
    /// A separate stream of each context: clearing waits for no work of the guest.
    streams: HashMap<u64, Handle>,
}

impl SessionImages {
    /// Forgets everything in a context that is being destroyed: it ends, and its memory is counted, with the context.
    pub(super) fn forget(&mut self, context: ContextRef) {
        self.arrays.retain(|_, array| array.context != context);
        self.mipmapped.retain(|_, array| array.context != context);
        self.textures.forget(context);
        self.surfaces.forget(context);
        self.streams.remove(&context.serial);
    }

    /// Clears one level of an array. The context is the current one.
    fn clear(
        &mut self,
        (driver, completion): (&Driver, &Completion),
        (context, device): (ContextRef, i32),
        array: Handle,
        shape: &ArrayShape,
    ) -> Result<(), Code> {
        let stream = match self.streams.get(&context.serial) {
            Some(stream) => *stream,
            None => {
                let stream = driver.cuStreamCreateWithPriority(NON_BLOCKING, 0)?;
                self.streams.insert(context.serial, stream);
                stream
            }
        };
        // A session has fewer than 256 devices.
        let device = u8::try_from(device).unwrap_or(u8::MAX);
        Clearing { driver, completion, device, stream, array }.run(shape.bytes())
    }
}

/// The clearing of one level.
struct Clearing<'a> {
    driver: &'a Driver,
    completion: &'a Completion,
    device: u8,
    stream: Handle,
    array: Handle,
}

impl Clearing<'_> {
    /// Writes zeroes: to a first part from the host, then from the part that is written to the next one.
    fn run(&self, [width, height, depth]: [u64; 3]) -> Result<(), Code> {
        let step = |length: u64| usize::try_from(length).map_err(|_| code::INVALID_VALUE);
        // A row may be longer than the zeroes; elements have up to 16 bytes, which divide these.
        let columns = width.min(Driver::ZEROES);
        let first = (Driver::ZEROES / columns).clamp(1, height);
        for column in (0..width).step_by(step(columns)?) {
            let (at, extent) = ([narrow(column)?, 0, 0], [columns.min(width - column), first, 1]);
            let clear = || self.driver.array_clear(self.array, at, extent, self.stream);
            self.piece(extent.iter().product(), clear)?;
        }
        let rows = (PIECE / width).clamp(1, height);
        let mut done = first;
        while done < height {
            let next = done.min(height - done).min(rows);
            self.spread([0, 0], [done, 0], [width, next, 1])?;
            done += next;
        }
        let slices = (PIECE / width / height).max(1);
        let mut done = 1;
        while done < depth {
            let next = done.min(depth - done).min(slices);
            for row in (0..height).step_by(step(rows)?) {
                self.spread([row, 0], [row, done], [width, rows.min(height - row), next])?;
            }
            done += next;
        }
        Ok(())
    }

    /// Copies whole rows, from the row and slice of their first.
    fn spread(&self, from: [u64; 2], to: [u64; 2], extent: [u64; 3]) -> Result<(), Code> {
        let end = |[row, slice]: [u64; 2]| -> Result<ArrayCopyEnd, Code> {
            Ok(ArrayCopyEnd::Array(self.array, [0, narrow(row)?, narrow(slice)?]))
        };
        let [width, height, depth] = extent;
        let copy = ArrayCopy {
            to: end(to)?,
            from: end(from)?,
            extent: [narrow(width)?, narrow(height)?, narrow(depth)?],
        };
        self.piece(extent.iter().product(), || self.driver.memcpy_box(&copy.into(), self.stream))
    }

    /// Makes one piece, and waits for its end.
    fn piece(&self, bytes: u64, submit: impl FnOnce() -> Result<(), Code>) -> Result<(), Code> {
        self.completion.charge(self.device, bytes, || {
            let submitted = submit();
            // Also after a failure, because a copy may be under way.
            self.driver.cuStreamSynchronize(self.stream).and(submitted)
        })
    }
}

fn narrow(value: u64) -> Result<u32, Code> {
    u32::try_from(value).map_err(|_| code::INVALID_VALUE)
}

impl ModuleHelper {
    /// Clears all levels of a mipmapped array.
    fn clear_levels(&mut self, whole: Handle, memory: &ArrayMemory) -> Result<(), Code> {
        for level in 0..memory.shape.levels() {
            let array = self.driver.cuMipmappedArrayGetLevel(whole, level)?;
            self.clear(array, memory, &memory.shape.level(level)?)?;
        }
        Ok(())
    }

    fn clear(&mut self, array: Handle, memory: &ArrayMemory, shape: &ArrayShape) -> Result<(), Code> {
        let tools = (&*self.driver, &*self.completion);
        self.images.clear(tools, (memory.context, memory.device), array, shape)
    }

    fn granted_array(
        &self,
        caller: ModuleCaller,
        shape: ArrayShape,
        create: impl FnMut() -> Result<Handle, Code>,
    ) -> Result<(Handle, ArrayMemory), Code> {
        let (context, device) = caller.ok_or(code::INVALID_CONTEXT)?;
        let bytes = custody::in_blocks(shape.device_bytes());
        let reason = (Growth::Array, device);
        let (handle, bytes) = self.granted(reason, Some(context), bytes, code::OUT_OF_MEMORY, create)?;
        Ok((handle, ArrayMemory { context, device, bytes, shape }))
    }

    fn shrank(&self, array: ArrayMemory) {
        self.memory_source.driver_shrank(array.device, Some(array.context), array.bytes);
    }

    /// Makes an object, with a grant for the driver's descriptors if the earlier ones are used up.
    fn make_object(
        &mut self,
        (context, device): (ContextRef, i32),
        kind: fn(&mut SessionImages) -> &mut ImageObjects,
        most: usize,
        create: impl Fn(&Driver) -> Result<u64, Code>,
    ) -> Result<u64, Code> {
        let objects = kind(&mut self.images);
        if objects.live.len() >= most {
            return Err(code::OUT_OF_MEMORY);
        }
        let (live, granted) = objects.counts.get(&context.serial).copied().unwrap_or_default();
        let (object, granted) = if live < granted {
            (create(&self.driver)?, granted)
        } else {
            let reason = (Growth::Array, device);
            let made = self.granted(reason, Some(context), 0, code::OUT_OF_MEMORY, || create(&self.driver));
            (made?.0, granted.saturating_add(OBJECTS_OF_GRANT))
        };
        let objects = kind(&mut self.images);
        objects.live.insert((context.serial, object));
        objects.counts.insert(context.serial, (live.saturating_add(1), granted));
        Ok(object)
    }

    /// Destroys an object of the caller's context, which is the current one.
    fn end_object(
        &mut self,
        caller: ModuleCaller,
        object: u64,
        kind: fn(&mut SessionImages) -> &mut ImageObjects,
        destroy: impl Fn(&Driver) -> Result<(), Code>,
    ) -> Result<(), Code> {
        let (context, _) = caller.ok_or(code::INVALID_CONTEXT)?;
        let objects = kind(&mut self.images);
        if !objects.live.contains(&(context.serial, object)) {
            return Err(code::INVALID_VALUE);
        }
        destroy(&self.driver)?;
        objects.live.remove(&(context.serial, object));
        if let Some((live, _)) = objects.counts.get_mut(&context.serial) {
            *live = live.saturating_sub(1);
        }
        Ok(())
    }

    /// Finds a reference of a module, in the caller's context.
    fn reference(
        &mut self,
        caller: ModuleCaller,
        module: &ModuleRef,
        find: impl Fn(&Driver, Handle) -> Result<Handle, Code>,
    ) -> Result<GuestReference, Code> {
        self.place(module.image, caller)?;
        let (context, _) = caller.ok_or(code::INVALID_CONTEXT)?;
        let image = match module.image {
            GuestImage::Module(image) => image,
            GuestImage::Library(library) => self.driver.cuLibraryGetModule(library)?,
        };
        let handle = find(&self.driver, image)?;
        Ok(GuestReference { handle, module: module.id, context })
    }
}

impl ServeImages for ModuleHelper {
    fn array_create(
        &mut self,
        caller: ModuleCaller,
        args: module::array_create,
    ) -> Result<wire::array_create::Reply, Code> {
        let module::array_create { extent, format, channels, flags, array: id } = args;
        let shape = ArrayShape::new(ArrayExtent { extent, format, channels, flags }, None)?;
        let (handle, array) =
            self.granted_array(caller, shape, || self.driver.array_create(&shape.driver()))?;
        if let Err(failed) = self.clear(handle, &array, &shape) {
            self.driver.cuArrayDestroy(handle)?;
            self.shrank(array);
            return Err(failed);
        }
        self.images.arrays.insert(handle, array);
        id.fill(GuestArray { handle, context: array.context, shape, level_of: None });
        Ok(wire::array_create::Reply {})
    }

    fn array_destroy(
        &mut self,
        _: ModuleCaller,
        args: module::array_destroy,
    ) -> Result<wire::array_destroy::Reply, Code> {
        let handle = args.array.handle;
        let memory = *self.images.arrays.get(&handle).ok_or(code::INVALID_HANDLE)?;
        report_uncleared(self.clear(handle, &memory, &memory.shape))?;
        self.images.arrays.remove(&handle);
        self.driver.cuArrayDestroy(handle)?;
        self.shrank(memory);
        Ok(wire::array_destroy::Reply {})
    }

    fn mipmapped_array_create(
        &mut self,
        caller: ModuleCaller,
        args: module::mipmapped_array_create,
    ) -> Result<wire::mipmapped_array_create::Reply, Code> {
        let module::mipmapped_array_create { extent, format, channels, flags, levels, array: id } = args;
        let shape = ArrayShape::new(ArrayExtent { extent, format, channels, flags }, Some(levels))?;
        let create = || self.driver.mipmapped_array_create(&shape.driver(), levels);
        let (handle, array) = self.granted_array(caller, shape, create)?;
        if let Err(failed) = self.clear_levels(handle, &array) {
            self.driver.cuMipmappedArrayDestroy(handle)?;
            self.shrank(array);
            return Err(failed);
        }
        self.images.mipmapped.insert(handle, array);
        id.fill(GuestMipmapped { handle, context: array.context, shape });
        Ok(wire::mipmapped_array_create::Reply {})
    }

    fn mipmapped_array_level(
        &mut self,
        _: ModuleCaller,
        args: module::mipmapped_array_level,
    ) -> Result<wire::mipmapped_array_level::Reply, Code> {
        let (whole_id, whole) = args.whole;
        let shape = whole.shape.level(args.level)?;
        let handle = self.driver.cuMipmappedArrayGetLevel(whole.handle, args.level)?;
        args.array.fill(GuestArray { handle, context: whole.context, shape, level_of: Some(whole_id) });
        Ok(wire::mipmapped_array_level::Reply {})
    }

    fn mipmapped_array_destroy(
        &mut self,
        _: ModuleCaller,
        args: module::mipmapped_array_destroy,
    ) -> Result<wire::mipmapped_array_destroy::Reply, Code> {
        let handle = args.array.handle;
        let memory = *self.images.mipmapped.get(&handle).ok_or(code::INVALID_HANDLE)?;
        report_uncleared(self.clear_levels(handle, &memory))?;
        self.images.mipmapped.remove(&handle);
        self.driver.cuMipmappedArrayDestroy(handle)?;
        self.shrank(memory);
        Ok(wire::mipmapped_array_destroy::Reply {})
    }

    fn texture_create(
        &mut self,
        caller: ModuleCaller,
        args: module::texture_create,
    ) -> Result<wire::texture_create::Reply, Code> {
        let memory = args.resource.memory.ok_or(code::INVALID_VALUE)?;
        let create = |driver: &Driver| driver.texture_create(&memory, &args.sampling, args.view.0.as_ref());
        let caller = caller.ok_or(code::INVALID_CONTEXT)?;
        let texture =
            self.make_object(caller, |images| &mut images.textures, limits::TEXTURE_OBJECTS, create)?;
        Ok(wire::texture_create::Reply { texture })
    }

    fn texture_destroy(
        &mut self,
        caller: ModuleCaller,
        args: module::texture_destroy,
    ) -> Result<wire::texture_destroy::Reply, Code> {
        let destroy = |driver: &Driver| driver.cuTexObjectDestroy(args.texture);
        self.end_object(caller, args.texture, |images| &mut images.textures, destroy)?;
        Ok(wire::texture_destroy::Reply {})
    }

    fn surface_create(
        &mut self,
        caller: ModuleCaller,
        args: module::surface_create,
    ) -> Result<wire::surface_create::Reply, Code> {
        let caller = caller.ok_or(code::INVALID_CONTEXT)?;
        let create = |driver: &Driver| driver.surface_create(args.array.handle);
        let surface =
            self.make_object(caller, |images| &mut images.surfaces, limits::SURFACE_OBJECTS, create)?;
        Ok(wire::surface_create::Reply { surface })
    }

    fn surface_destroy(
        &mut self,
        caller: ModuleCaller,
        args: module::surface_destroy,
    ) -> Result<wire::surface_destroy::Reply, Code> {
        let destroy = |driver: &Driver| driver.cuSurfObjectDestroy(args.surface);
        self.end_object(caller, args.surface, |images| &mut images.surfaces, destroy)?;
        Ok(wire::surface_destroy::Reply {})
    }

    fn texture_reference(
        &mut self,
        caller: ModuleCaller,
        args: module::texture_reference,
    ) -> Result<wire::texture_reference::Reply, Code> {
        let name = &args.name;
        let found =
            self.reference(caller, &args.module, |driver, image| driver.texture_reference(image, name))?;
        args.reference.fill(found);
        Ok(wire::texture_reference::Reply {})
    }

    fn texture_reference_set(
        &mut self,
        _: ModuleCaller,
        args: module::texture_reference_set,
    ) -> Result<wire::texture_reference_set::Reply, Code> {
        let reference = args.reference.handle;
        self.driver.texture_reference_sample(reference, &args.sampling)?;
        self.driver.texture_reference_bind(reference, args.resource.memory.as_ref())?;
        Ok(wire::texture_reference_set::Reply {})
    }

    fn surface_reference(
        &mut self,
        caller: ModuleCaller,
        args: module::surface_reference,
    ) -> Result<wire::surface_reference::Reply, Code> {
        let name = &args.name;
        let found =
            self.reference(caller, &args.module, |driver, image| driver.surface_reference(image, name))?;
        args.reference.fill(found);
        Ok(wire::surface_reference::Reply {})
    }

    fn surface_reference_set(
        &mut self,
        _: ModuleCaller,
        args: module::surface_reference_set,
    ) -> Result<wire::surface_reference_set::Reply, Code> {
        self.driver.cuSurfRefSetArray(args.reference.handle, args.array.handle, 0)?;
        Ok(wire::surface_reference_set::Reply {})
    }
}

/// Reports an array that could not be cleared. The contents of one in a broken context are cleared when its process has ended. Any other is
/// not destroyed: it keeps its memory, which stays granted, until its context ends.
fn report_uncleared(cleared: Result<(), Code>) -> Result<(), Code> {
    let Err(failed) = cleared else { return Ok(()) };
    limited!(warn, code = failed, "cannot clear an array before it is destroyed");
    if status::is_sticky(failed) { Ok(()) } else { Err(failed) }
}
