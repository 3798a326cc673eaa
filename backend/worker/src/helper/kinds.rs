//! The kinds of the wire table as a helper thread receives them: objects instead of ids, held memory instead of addresses.
//!
//! The dispatcher resolves each parameter before it hands a call over, because only the dispatcher has the tables of the session.

use crate::{
    arenas::HeldRange,
    helper::notice::{Notice, Notices},
    session::objects::{self, ContextRef, GuestImage},
};
use sluice_cuda_abi::jit;
use sluice_driver::{Code, Handle, LaunchAttribute, code};
use sluice_protocol::{
    field::{
        AccessFlags, ArenaIn, ArenaOut, ArenaText, CarriedOptions, DeviceAddress, LaunchAttributes, Mint,
        Name, Ordinal, Size, Take,
    },
    handle::{self, Id, Kind},
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
