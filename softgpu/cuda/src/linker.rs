//! The linker: PTX texts that name each other become one image.
//!
//! A [`PendingLink`] has the inputs; a [`LinkObject`] is one that a program holds, with the places for its logs.

#![expect(unsafe_code, reason = "places of the program that stay valid as long as its link")]

use std::ffi::c_void;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use sluice_cuda_abi::image::Fatbin;
use sluice_cuda_abi::jit::input;
use softgpu_engine::{LoadErrorKind, Module, SourceUnit};

use crate::context::current_core;
use crate::error::{Error, Result};
use crate::gpu;
use crate::handles::{Kind, Registry};
use crate::image::{ELF, FATBIN, LoadRefusal, describe, select_ptx, unknown};
use crate::jit::JitOptions;
use crate::linked::{self, LinkedText};
use crate::lock::lock;
use crate::log::log;

static LINKS: Registry<Mutex<LinkObject>> = Registry::new(Kind::Link, Error::INVALID_HANDLE);

/// Limit on the texts of a link.
pub(crate) const INPUTS: usize = 1 << 14;

/// The member of the vendor's archive of the device runtime, which has machine code only.
const RUNTIME_MEMBER: &[u8] = b"cuda_device_runtime.o/";
/// The functions of the device runtime that the engine does not have by itself. They are weak, since a program may link the runtime twice.
const RUNTIME: &[u8] = include_bytes!("device_runtime.ptx");

type Outcome<T = ()> = std::result::Result<T, LoadRefusal>;

/// The inputs of a link.
#[derive(Default)]
pub(crate) struct PendingLink {
    texts: Vec<LinkedText>,
    /// The name of the input of each text.
    names: Vec<String>,
    /// The refusal of bytes that are no object, which NVIDIA's driver does not read before the link is completed.
    unread: Option<LoadRefusal>,
}

impl PendingLink {
    /// Adds the PTX of an input.
    pub(crate) fn add(&mut self, kind: u32, bytes: &[u8], name: &str, max_registers: Option<u32>) -> Outcome {
        let named = |refusal: LoadRefusal| LoadRefusal {
            text: format!("error: {name}: {}\n", refusal.text),
            ..refusal
        };
        if kind == input::OBJECT && !bytes.starts_with(&ELF) {
            self.unread.get_or_insert_with(|| named(unknown()));
            return Ok(());
        }
        let texts = texts(kind, bytes, max_registers).map_err(named)?;
        for LinkedText { text, .. } in &texts {
            Module::check(text, gpu::image_capability().sm())
                .map_err(|error| named(LoadRefusal::from(error)))?;
        }
        if self.texts.len() + texts.len() > INPUTS {
            return Err(LoadRefusal::from(Error::OUT_OF_MEMORY));
        }
        self.names.resize(self.texts.len() + texts.len(), name.to_owned());
        self.texts.extend(texts);
        Ok(())
    }

    /// Links the inputs. Returns the file, and a line about each kernel.
    pub(crate) fn complete(&self) -> Outcome<(Vec<u8>, String)> {
        if let Some(LoadRefusal { error, text }) = &self.unread {
            return Err(LoadRefusal { error: *error, text: text.clone() });
        }
        let units: Vec<SourceUnit<'_>> = self
            .texts
            .iter()
            .map(|LinkedText { text, max_registers }| SourceUnit { text, max_registers: *max_registers })
            .collect();
        let module = Module::load_units(&units, gpu::image_capability().sm()).map_err(|(unit, error)| {
            let name = self.names.get(unit).map_or("", String::as_str);
            let text = format!("error: {name}: {error}\n");
            // The vendor's linker has no code of its own for symbols.
            let code = if error.kind == LoadErrorKind::Link {
                Error::UNKNOWN
            } else {
                LoadRefusal::from(error).error
            };
            LoadRefusal { error: code, text }
        })?;
        let variables = module.globals().iter().map(|global| global.size).fold(0, u64::saturating_add);
        Ok((linked::encode(&self.texts, variables), describe(&module)))
    }
}

/// The texts of an input.
fn texts(kind: u32, bytes: &[u8], max_registers: Option<u32>) -> Outcome<Vec<LinkedText>> {
    let no_code =
        || LoadRefusal { error: Error::NO_BINARY_FOR_GPU, text: "no PTX for this device".to_owned() };
    let one = |text: Vec<u8>| vec![LinkedText { text, max_registers }];
    let selected = || select_ptx(bytes).map(one);
    match kind {
        input::PTX => selected(),
        input::CUBIN | input::FATBINARY => match linked::decode(bytes) {
            Some(units) => Ok(units
                .iter()
                .map(|unit| LinkedText { text: unit.text.to_vec(), max_registers: unit.max_registers })
                .collect()),
            None if bytes.starts_with(&ELF) => Err(no_code()),
            None if kind == input::FATBINARY && bytes.starts_with(&FATBIN) => selected(),
            None => Err(unknown()),
        },
        input::OBJECT | input::LIBRARY => {
            if kind == input::LIBRARY && !bytes.starts_with(b"!<arch>\n") {
                // NVIDIA's driver has no code of its own for it.
                return Err(LoadRefusal { error: Error::UNKNOWN, ..unknown() });
            }
            let texts: Vec<LinkedText> = fatbins(bytes)
                .filter_map(|fatbin| select_ptx(fatbin).ok())
                .map(|text| LinkedText { text, max_registers })
                .collect();
            if !texts.is_empty() {
                Ok(texts)
            } else if kind == input::LIBRARY
                && bytes.windows(RUNTIME_MEMBER.len()).any(|part| part == RUNTIME_MEMBER)
            {
                Ok(one(RUNTIME.to_vec()))
            } else {
                Err(no_code())
            }
        }
        input::NVVM => Err(LoadRefusal {
            error: Error::NOT_SUPPORTED,
            text: "code for link-time optimisation is not supported".to_owned(),
        }),
        _ => Err(LoadRefusal::from(Error::INVALID_VALUE)),
    }
}

/// The fatbins in the bytes of an object or an archive.
fn fatbins(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        loop {
            let at = bytes.windows(FATBIN.len()).position(|part| part == FATBIN)?;
            let from = &bytes[at..];
            let length = from.get(8..16).and_then(|size| Some(u64::from_le_bytes(size.try_into().ok()?)));
            let end = length.and_then(|length| usize::try_from(length.checked_add(16)?).ok());
            match end.and_then(|end| from.split_at_checked(end)) {
                Some((fatbin, rest)) if Fatbin::parse(fatbin).is_ok() => {
                    bytes = rest;
                    return Some(fatbin);
                }
                _ => bytes = &from[1..],
            }
        }
    })
}

/// A link that a program holds.
struct LinkObject {
    places: Places,
    pending: PendingLink,
    /// The result, which the program may read until it destroys the link.
    image: Vec<u8>,
    time: Duration,
    info: String,
    error: String,
}

/// The options of a link, with places of the program.
struct Places(JitOptions);

// SAFETY: by the interface, the places stay valid as long as the link, for every thread that uses it, and the registry's lock makes the
// threads use it one after the other.
unsafe impl Send for Places {}

impl LinkObject {
    /// Runs a step of the link, and adds its messages and its time to the program's places.
    fn step<T>(&mut self, step: impl FnOnce(&mut LinkObject) -> Outcome<T>) -> Result<T> {
        let start = Instant::now();
        let outcome = step(self);
        self.time += start.elapsed();
        if let Err(refusal) = &outcome {
            log!("link refused: {}", refusal.text.trim_end());
            self.error.push_str(&refusal.text);
        }
        self.places.0.write(self.time, &self.info, &self.error)?;
        outcome.map_err(|refusal| refusal.error)
    }
}

/// `cuLinkCreate`.
pub(crate) fn create(options: JitOptions) -> Result<u64> {
    current_core()?;
    let link = LinkObject {
        places: Places(options),
        pending: PendingLink::default(),
        image: Vec::new(),
        time: Duration::ZERO,
        info: String::new(),
        error: String::new(),
    };
    Ok(LINKS.insert_with(|_| Mutex::new(link))?.0)
}

/// Checks a handle.
pub(crate) fn find(handle: u64) -> Result {
    LINKS.get(handle).map(drop)
}

/// `cuLinkAddData`.
pub(crate) fn add(handle: u64, kind: u32, bytes: &[u8], name: &str, max_registers: Option<u32>) -> Result {
    let link = LINKS.get(handle)?;
    let mut link = lock(&link);
    let max_registers = max_registers.or(link.places.0.max_registers);
    link.step(|link| link.pending.add(kind, bytes, name, max_registers))
}

/// `cuLinkComplete`: the address and the length of the image.
pub(crate) fn complete(handle: u64) -> Result<(*mut c_void, usize)> {
    let link = LINKS.get(handle)?;
    let mut link = lock(&link);
    link.step(|link| {
        let (image, info) = link.pending.complete()?;
        link.image = image;
        if link.places.0.verbose {
            link.info.push_str(&info);
        }
        Ok(())
    })?;
    Ok((link.image.as_mut_ptr().cast(), link.image.len()))
}

/// `cuLinkDestroy`.
pub(crate) fn destroy(handle: u64) -> Result {
    LINKS.remove(handle).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: &str = ".version 7.0 .target sm_80 .address_size 64 .extern .func helper; \
        .visible .entry run() { call.uni helper; ret; }";
    const HELPER: &str = ".version 7.0 .target sm_80 .address_size 64 .visible .func helper { ret; }";

    fn linked(texts: &[&str]) -> std::result::Result<Vec<u8>, (Error, String)> {
        let mut link = PendingLink::default();
        for (number, text) in texts.iter().enumerate() {
            let added = link.add(input::PTX, text.as_bytes(), &format!("input {number}"), None);
            added.map_err(|refusal| (refusal.error, refusal.text))?;
        }
        link.complete().map(|(image, _)| image).map_err(|refusal| (refusal.error, refusal.text))
    }

    #[test]
    fn declaration_stands_for_the_definition_of_another_input() {
        for order in [[CALLER, HELPER], [HELPER, CALLER]] {
            let image = linked(&order).unwrap();
            let units = linked::decode(&image).unwrap();
            let module =
                Module::load_units(&units, gpu::image_capability().sm()).map_err(|(_, error)| error).unwrap();
            assert_eq!(module.kernels().len(), 1);
        }
    }

    #[test]
    fn missing_and_repeated_symbols_are_errors_that_name_them() {
        let (error, text) = linked(&[CALLER]).unwrap_err();
        assert_eq!(error, Error::UNKNOWN);
        assert!(text.contains("input 0") && text.contains("helper"), "{text}");
        let (error, text) = linked(&[HELPER, HELPER, CALLER]).unwrap_err();
        assert_eq!(error, Error::UNKNOWN);
        assert!(text.contains("input 1") && text.contains("multiple definition of helper"), "{text}");
        let (error, text) = linked(&["no PTX"]).unwrap_err();
        assert_eq!(error, Error::INVALID_IMAGE);
        assert!(text.contains("input 0"), "{text}");
    }

    // Promise: S91
    #[test]
    fn object_that_is_none_is_refused_when_the_link_is_completed() {
        let mut link = PendingLink::default();
        let mut add = |kind| link.add(kind, b"no file", "odd", None).map_err(|refusal| refusal.error);
        assert_eq!(add(input::LIBRARY), Err(Error::UNKNOWN));
        assert_eq!(add(input::CUBIN), Err(Error::INVALID_IMAGE));
        assert_eq!(add(input::OBJECT), Ok(()));
        let refusal = link.complete().map(drop).unwrap_err();
        assert_eq!(refusal.error, Error::INVALID_IMAGE);
        assert!(refusal.text.contains("odd"), "{}", refusal.text);
    }

    // Promise: S92
    #[test]
    fn archive_without_text_is_refused_unless_it_is_the_device_runtime() {
        let machine_code = |member: &str| format!("!<arch>\n//              {member}/\n");
        let mut link = PendingLink::default();
        let other = link.add(input::LIBRARY, machine_code("other.o").as_bytes(), "other", None).unwrap_err();
        assert_eq!(other.error, Error::NO_BINARY_FOR_GPU);
        let caller = ".version 7.0 .target sm_80 .address_size 64 \
            .extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 h, .param .b32 f); \
            .visible .entry run() { .reg .b32 %r; call.uni (%r), cudaCGSynchronize, (0, 0); ret; }";
        link.add(input::PTX, caller.as_bytes(), "caller", None).map_err(|refusal| refusal.text).unwrap();
        assert!(link.complete().is_err(), "the function is in no input");
        for _ in 0..2 {
            let runtime = machine_code("cuda_device_runtime.o");
            link.add(input::LIBRARY, runtime.as_bytes(), "runtime", None)
                .map_err(|refusal| refusal.text)
                .unwrap();
        }
        assert!(link.complete().is_ok());
    }

    #[test]
    fn weak_definitions_yield_and_names_of_one_input_stay_its_own() {
        let weak = HELPER.replace(".visible", ".weak");
        assert!(linked(&[&weak, &weak, HELPER, CALLER]).is_ok());
        let own = HELPER.replace(".visible ", "");
        assert!(linked(&[&own, CALLER]).is_err(), "it is not visible");
        assert!(linked(&[&own, HELPER, CALLER]).is_ok());
    }

    #[test]
    fn fatbins_are_found_anywhere_in_an_object() {
        let fatbin = [&FATBIN[..], &[1, 0, 16, 0], &8_u64.to_le_bytes(), &[0; 8]].concat();
        let cut = [&FATBIN[..], &[1, 0, 16, 0], &u64::MAX.to_le_bytes()].concat();
        let object = [b"\x7fELF...", &fatbin[..], b"odd", &cut, &fatbin].concat();
        assert_eq!(fatbins(&object).collect::<Vec<_>>(), [&fatbin[..], &fatbin]);
    }
}
