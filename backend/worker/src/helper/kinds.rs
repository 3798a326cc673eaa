//! The kinds of the wire table as a helper thread receives them: objects instead of ids, held memory instead of addresses.
//!
//! The dispatcher resolves each parameter before it hands a call over, because only the dispatcher has the tables of the session.

use crate::{
    arenas::HeldRange,
    graphs::plan::ConditionalSerial,
    helper::notice::{Notice, Notices},
    resources::ResolvedResources,
    session::{
        images::{GuestArray, GuestMipmapped, GuestReference, ResolvedImage},
        objects::{self, ContextRef, GuestContext, GuestImage, GuestObject},
    },
};
use sluice_cuda_abi::jit;
use sluice_driver::{Code, Handle, LaunchAttribute, code};
use sluice_protocol::{
    field::{
        AccessFlags, ArenaIn, ArenaOut, ArenaText, CarriedOptions, DeviceAddress, LaunchAttributes, Mint,
        Name, Ordinal, Size, Take,
    },
    handle::{self, Id, Kind},
    image::{ImageResource, ImageView, Sampling},
    resources::ResourceBytes,
};
use std::{ffi::CString, sync::Arc};

/// The tables of a session, by which parameters are resolved.
pub(crate) trait Tables {
    /// The driver's number of a device.
    fn device(&self, ordinal: Ordinal) -> Result<i32, Code>;
    /// A module or library.
    fn module(&self, id: Id<handle::Module>) -> Result<ModuleRef, Code>;
    /// Removes a module or library, and its functions.
    fn take_module(&mut self, id: Id<handle::Module>) -> Result<ModuleRef, Code>;
    /// A function or kernel.
    fn function(&self, id: Id<handle::Function>) -> Result<objects::GuestFunction, Code>;
    /// Takes a free id for a module in the making.
    fn reserve_module(&mut self, id: Id<handle::Module>) -> Result<ReservedId<handle::Module>, Code>;
    /// Takes a free id for a function in the making.
    fn reserve_function(&mut self, id: Id<handle::Function>) -> Result<ReservedId<handle::Function>, Code>;
    /// The driver's handle of a link.
    fn link(&self, id: Id<handle::Link>) -> Result<Handle, Code>;
    /// Removes a link.
    fn take_link(&mut self, id: Id<handle::Link>) -> Result<Handle, Code>;
    /// Takes a free id for a link in the making.
    fn reserve_link(&mut self, id: Id<handle::Link>) -> Result<ReservedId<handle::Link>, Code>;
    /// A context.
    fn context_of(&self, id: Id<handle::Context>) -> Result<GuestContext, Code>;
    /// A description of resources, with objects instead of ids.
    fn resources(&self, description: &[u8]) -> Result<ResolvedResources, Code>;
    /// Removes a green context that has no streams.
    fn take_green(&mut self, id: Id<handle::GreenContext>) -> Result<GuestObject, Code>;
    /// Takes a free id for a green context in the making.
    fn reserve_green(
        &mut self,
        id: Id<handle::GreenContext>,
    ) -> Result<ReservedId<handle::GreenContext>, Code>;
    /// A graph with handles for conditional nodes.
    fn conditional_graph(&self, id: Id<handle::ConditionalGraph>) -> Result<ConditionalSerial, Code>;
    /// Removes such a graph.
    fn take_conditional_graph(&mut self, id: Id<handle::ConditionalGraph>)
    -> Result<ConditionalSerial, Code>;
    /// Takes a free id for such a graph in the making.
    fn reserve_conditional_graph(
        &mut self,
        id: Id<handle::ConditionalGraph>,
    ) -> Result<ReservedId<handle::ConditionalGraph>, Code>;
    /// An array.
    fn array(&self, id: Id<handle::Array>) -> Result<GuestArray, Code>;
    /// Removes an array that is not a level of another.
    fn take_array(&mut self, id: Id<handle::Array>) -> Result<GuestArray, Code>;
    /// Takes a free id for an array in the making.
    fn reserve_array(&mut self, id: Id<handle::Array>) -> Result<ReservedId<handle::Array>, Code>;
    /// An array with levels, one of which gets a name.
    fn mipmapped_to_name(&mut self, id: Id<handle::MipmappedArray>) -> Result<GuestMipmapped, Code>;
    /// Removes an array with its levels.
    fn take_mipmapped(&mut self, id: Id<handle::MipmappedArray>) -> Result<GuestMipmapped, Code>;
    /// Takes a free id for an array with levels in the making.
    fn reserve_mipmapped(
        &mut self,
        id: Id<handle::MipmappedArray>,
    ) -> Result<ReservedId<handle::MipmappedArray>, Code>;
    /// A texture reference.
    fn texture_reference(&self, id: Id<handle::TextureReference>) -> Result<GuestReference, Code>;
    /// Takes a free id for a texture reference.
    fn reserve_texture_reference(
        &mut self,
        id: Id<handle::TextureReference>,
    ) -> Result<ReservedId<handle::TextureReference>, Code>;
    /// A surface reference.
    fn surface_reference(&self, id: Id<handle::SurfaceReference>) -> Result<GuestReference, Code>;
    /// Takes a free id for a surface reference.
    fn reserve_surface_reference(
        &mut self,
        id: Id<handle::SurfaceReference>,
    ) -> Result<ReservedId<handle::SurfaceReference>, Code>;
    /// The memory of a texture, looked up in whole.
    fn image(&self, resource: ImageResource) -> Result<ResolvedImage, Code>;
    /// Arena memory, held so that it stays mapped.
    fn hold(&self, address: u64, bytes: u64) -> Result<HeldRange, Code>;
    /// Attributes of a launch, with objects instead of ids.
    fn attributes(&self, attributes: LaunchAttributes<'_>) -> Result<Vec<LaunchAttribute>, Code>;
}

/// A kind of parameter that a helper thread can receive.
pub(crate) trait Resolve {
    /// The owned form of a parameter.
    type Owned: core::fmt::Debug + Send;

    /// Looks the parameter up.
    fn resolve(self, tables: &mut impl Tables) -> Result<Self::Owned, Code>;

    /// The context of the object, if it has one.
    fn context(_: &Self::Owned) -> Option<ContextRef> {
        None
    }
}

macro_rules! resolved {
    ($($kind:ty => $owned:ty, |$value:ident, $tables:ident| $resolved:expr;)+) => {$(
        impl Resolve for $kind {
            type Owned = $owned;
            fn resolve(self, $tables: &mut impl Tables) -> Result<$owned, Code> {
                let $value = self;
                $resolved
            }
        }
    )+};
}

resolved! {
    u32 => u32, |value, _tables| Ok(value);
    u64 => u64, |value, _tables| Ok(value);
    u128 => u128, |value, _tables| Ok(value);
    i32 => i32, |value, _tables| Ok(value);
    bool => bool, |value, _tables| Ok(value);
    [u32; 3] => [u32; 3], |value, _tables| Ok(value);
    [u64; 3] => [u64; 3], |value, _tables| Ok(value);
    Sampling => Sampling, |value, _tables| Ok(value);
    ImageView => ImageView, |value, _tables| Ok(value);
    Mint<handle::Array> => ReservedId<handle::Array>, |id, tables| tables.reserve_array(id.0);
    Mint<handle::MipmappedArray> => ReservedId<handle::MipmappedArray>, |id, tables| tables.reserve_mipmapped(id.0);
    Mint<handle::TextureReference> => ReservedId<handle::TextureReference>,
        |id, tables| tables.reserve_texture_reference(id.0);
    Mint<handle::SurfaceReference> => ReservedId<handle::SurfaceReference>,
        |id, tables| tables.reserve_surface_reference(id.0);
    AccessFlags => AccessFlags, |value, _tables| Ok(value);
    // The thread that owns device memory looks the address up.
    DeviceAddress => u64, |address, _tables| Ok(address.0);
    Ordinal => i32, |ordinal, tables| tables.device(ordinal);
    Name<'_> => CString, |name, _tables| CString::new(name.0).map_err(|_| code::INVALID_VALUE);
    Mint<handle::Module> => ReservedId<handle::Module>, |id, tables| tables.reserve_module(id.0);
    Mint<handle::Function> => ReservedId<handle::Function>, |id, tables| tables.reserve_function(id.0);
    Mint<handle::Link> => ReservedId<handle::Link>, |id, tables| tables.reserve_link(id.0);
    Id<handle::Link> => Handle, |id, tables| tables.link(id);
    Take<handle::Link> => Handle, |id, tables| tables.take_link(id.0);
    ResourceBytes<'_> => ResolvedResources, |bytes, tables| tables.resources(bytes.0);
    Mint<handle::GreenContext> => ReservedId<handle::GreenContext>, |id, tables| tables.reserve_green(id.0);
    Mint<handle::ConditionalGraph> => ReservedId<handle::ConditionalGraph>,
        |id, tables| tables.reserve_conditional_graph(id.0);
    Id<handle::ConditionalGraph> => ConditionalSerial, |id, tables| tables.conditional_graph(id);
    Take<handle::ConditionalGraph> => ConditionalSerial, |id, tables| tables.take_conditional_graph(id.0);
    CarriedOptions<'_> => Vec<(u32, u32)>, |options, _tables| carried(options);
    LaunchAttributes<'_> => Vec<LaunchAttribute>, |attributes, tables| tables.attributes(attributes);
}

/// Options of the compiler with numbers as values. Those with pointers would make the driver use memory of this process.
fn carried(options: CarriedOptions<'_>) -> Result<Vec<(u32, u32)>, Code> {
    let options: Vec<(u32, u32)> = options.list().collect();
    if options.iter().all(|(option, _)| jit::is_carried(*option)) {
        Ok(options)
    } else {
        Err(code::INVALID_VALUE)
    }
}

impl<const LIMIT: u64> Resolve for Size<LIMIT> {
    type Owned = u64;
    fn resolve(self, _: &mut impl Tables) -> Result<u64, Code> {
        Ok(self.0)
    }
}

macro_rules! held {
    ($($range:ident),+) => {$(
        impl<const LIMIT: u64> Resolve for $range<LIMIT> {
            type Owned = HeldRange;
            fn resolve(self, tables: &mut impl Tables) -> Result<HeldRange, Code> {
                tables.hold(self.address, self.bytes)
            }
        }
    )+};
}
held!(ArenaIn, ArenaOut, ArenaText);

/// A module or library, and the guest's id of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModuleRef {
    pub(crate) id: Id<handle::Module>,
    pub(crate) image: GuestImage,
    /// `None` for a library.
    pub(crate) context: Option<ContextRef>,
}

impl Resolve for Id<handle::Module> {
    type Owned = ModuleRef;
    fn resolve(self, tables: &mut impl Tables) -> Result<ModuleRef, Code> {
        tables.module(self)
    }
    fn context(module: &ModuleRef) -> Option<ContextRef> {
        module.context
    }
}

impl Resolve for Take<handle::Module> {
    type Owned = ModuleRef;
    fn resolve(self, tables: &mut impl Tables) -> Result<ModuleRef, Code> {
        tables.take_module(self.0)
    }
    fn context(module: &ModuleRef) -> Option<ContextRef> {
        module.context
    }
}

impl Resolve for Id<handle::Function> {
    type Owned = objects::GuestFunction;
    fn resolve(self, tables: &mut impl Tables) -> Result<objects::GuestFunction, Code> {
        tables.function(self)
    }
    fn context(function: &objects::GuestFunction) -> Option<ContextRef> {
        function.context
    }
}

macro_rules! in_context {
    ($($kind:ty => $owned:ty, |$value:ident, $tables:ident| $resolved:expr, $context:expr;)+) => {$(
        impl Resolve for $kind {
            type Owned = $owned;
            fn resolve(self, $tables: &mut impl Tables) -> Result<$owned, Code> {
                let $value = self;
                $resolved
            }
            fn context(owned: &$owned) -> Option<ContextRef> {
                $context(owned)
            }
        }
    )+};
}

in_context! {
    Id<handle::Array> => GuestArray, |id, tables| tables.array(id), |array: &GuestArray| Some(array.context);
    Take<handle::Array> => GuestArray, |id, tables| tables.take_array(id.0),
        |array: &GuestArray| Some(array.context);
    Id<handle::MipmappedArray> => (Id<handle::MipmappedArray>, GuestMipmapped),
        |id, tables| Ok((id, tables.mipmapped_to_name(id)?)),
        |whole: &(Id<handle::MipmappedArray>, GuestMipmapped)| Some(whole.1.context);
    Take<handle::MipmappedArray> => GuestMipmapped, |id, tables| tables.take_mipmapped(id.0),
        |whole: &GuestMipmapped| Some(whole.context);
    Id<handle::Context> => GuestContext, |id, tables| tables.context_of(id), |of: &GuestContext| Some(of.context);
    Take<handle::GreenContext> => GuestObject, |id, tables| tables.take_green(id.0),
        |green: &GuestObject| green.context;
    Id<handle::TextureReference> => GuestReference, |id, tables| tables.texture_reference(id),
        |reference: &GuestReference| Some(reference.context);
    Id<handle::SurfaceReference> => GuestReference, |id, tables| tables.surface_reference(id),
        |reference: &GuestReference| Some(reference.context);
    ImageResource => ResolvedImage, |resource, tables| tables.image(resource),
        |image: &ResolvedImage| image.context;
}

/// A kind of object that a helper thread makes.
pub(crate) trait MadeKind: Kind + Send + 'static {
    type Object;
    /// Sends the object to the dispatcher, or frees the id if there is no object.
    fn notice(id: Id<Self>, object: Option<Self::Object>) -> Notice;
}

impl MadeKind for handle::Module {
    type Object = objects::GuestModule;
    fn notice(id: Id<Self>, module: Option<objects::GuestModule>) -> Notice {
        Notice::Module { id, module }
    }
}

impl MadeKind for handle::Function {
    type Object = (Id<handle::Module>, objects::GuestFunction);
    fn notice(id: Id<Self>, function: Option<Self::Object>) -> Notice {
        Notice::Function { id, function }
    }
}

impl MadeKind for handle::Link {
    type Object = Handle;
    fn notice(id: Id<Self>, link: Option<Handle>) -> Notice {
        Notice::Link { id, link }
    }
}

impl MadeKind for handle::GreenContext {
    type Object = (Handle, ContextRef);
    fn notice(id: Id<Self>, object: Option<(Handle, ContextRef)>) -> Notice {
        Notice::GreenContext { id, object }
    }
}

macro_rules! made {
    ($($kind:ident: $object:ty => $notice:ident;)+) => {$(
        impl MadeKind for handle::$kind {
            type Object = $object;
            fn notice(id: Id<Self>, object: Option<$object>) -> Notice {
                Notice::$notice { id, object }
            }
        }
    )+};
}
made! {
    ConditionalGraph: ConditionalSerial => ConditionalGraph;
    Array: GuestArray => Array;
    MipmappedArray: GuestMipmapped => MipmappedArray;
    TextureReference: GuestReference => TextureReference;
    SurfaceReference: GuestReference => SurfaceReference;
}

/// An id that is reserved for an object in the making. It becomes free again when this is dropped without an object.
#[derive(Debug)]
pub(crate) struct ReservedId<K: MadeKind> {
    id: Option<Id<K>>,
    notices: Arc<Notices>,
}

impl<K: MadeKind> ReservedId<K> {
    pub(crate) fn new(id: Id<K>, notices: Arc<Notices>) -> ReservedId<K> {
        ReservedId { id: Some(id), notices }
    }

    /// Gives the id its object.
    pub(crate) fn fill(mut self, object: K::Object) {
        if let Some(id) = self.id.take() {
            self.notices.push(K::notice(id, Some(object)));
        }
    }
}

impl<K: MadeKind> Drop for ReservedId<K> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.notices.push(K::notice(id, None));
        }
    }
}
