//! The settings of a VM, each written once.
//!
//! A row of `settings!` is all that a setting needs but its use. It becomes a field of requests, answers and the state file of the
//! daemon, an option of `sluice`, and part of the API's description; its bounds are checked here. Groups of rows are flattened into
//! the structures of this API.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::openapi::{
    KnownFormat, Object, ObjectBuilder, OneOfBuilder, Ref, RefOr, Schema, SchemaFormat,
    schema::{AdditionalProperties, RefBuilder, SchemaType, Type},
};

use super::Priority;
use crate::ByteSize;

/// Upper limit of sizes in requests: 2^52 bytes, which every JSON reader reads exactly.
pub const BYTES: u64 = 1 << 52;

/// Upper limit of 32-bit numbers in requests: JSON readers with signed integers read it, too.
pub const NUMBER: u32 = i32::MAX.unsigned_abs();

/// A setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Name in the API.
    pub name: &'static str,
    /// Name in command lines.
    pub option: &'static str,
    /// Form of its values.
    pub form: Form,
    /// True if tenants may give it to their VMs; otherwise only operators may.
    pub for_tenants: bool,
    about: &'static [&'static str],
    bounds: Option<(u64, u64)>,
    /// Writes the value that a VM has if neither its request nor its size gives one.
    default: fn() -> String,
    /// Meaning of 0, where that is no amount.
    zero: Option<&'static str>,
}

/// Form of the values of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A number of bytes, which people may write with a unit.
    Size,
    /// A number.
    Number,
    /// A word.
    Word {
        /// Name of its type in the description of the API.
        schema: &'static str,
        /// Words that there are.
        words: &'static [&'static str],
    },
}

impl fmt::Display for Form {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Size => {
                formatter.write_str("a number of bytes, or one with KiB, MiB, GiB or TiB behind it")
            }
            Form::Number => formatter.write_str("a whole number that is not negative"),
            Form::Word { words, .. } => write!(formatter, "one of {}", words.join(", ")),
        }
    }
}

/// The value of a setting is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// The text is not a value.
    #[error("{name} cannot be {text:?}: it is {form}")]
    NotAValue {
        /// Name of the setting.
        name: &'static str,
        /// The text.
        text: String,
        /// Form of the setting's values.
        form: Form,
    },
    /// The number is out of bounds.
    #[error("{name} is {value}; it can be {least} to {most}")]
    OutOfBounds {
        /// Name of the setting.
        name: &'static str,
        /// The number.
        value: u64,
        /// Lower bound.
        least: u64,
        /// Upper bound.
        most: u64,
    },
}

impl Setting {
    /// The first sentence of its meaning, without a full stop.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.about.first().copied().unwrap_or_default().trim().trim_end_matches('.')
    }

    /// Unit of its numbers in the API, which its name there tells.
    fn unit(&self) -> &'static str {
        let units =
            [("_bytes", ", in bytes"), ("_seconds", ", in seconds"), ("_permille", ", in thousandths")];
        units.into_iter().find_map(|(end, unit)| self.name.ends_with(end).then_some(unit)).unwrap_or_default()
    }

    /// Its meaning in the API, and what `more` says of its values.
    fn described(&self, more: Option<String>) -> String {
        let mut text = format!("{}{}.", self.title(), self.unit());
        for sentence in self.about.iter().skip(1) {
            text.push_str(sentence);
        }
        if let Some(more) = more {
            text.push(' ');
            text.push_str(&more);
        }
        text
    }

    /// The default in words.
    fn default(&self) -> String {
        match (self.zero, self.form) {
            (Some(zero), _) => zero.to_owned(),
            (None, Form::Word { .. }) => format!("`{}`", (self.default)()),
            (None, _) => (self.default)(),
        }
    }

    fn check(&self, value: impl Value) -> Result<(), SettingError> {
        match (value.number(), self.bounds) {
            (Some(value), Some((least, most))) if !(least..=most).contains(&value) => {
                Err(SettingError::OutOfBounds { name: self.name, value, least, most })
            }
            _ => Ok(()),
        }
    }

    fn read<T: Value>(&self, text: &str) -> Result<T, SettingError> {
        let no_value = || SettingError::NotAValue { name: self.name, text: text.to_owned(), form: self.form };
        let value = T::read(text).ok_or_else(no_value)?;
        self.check(value).map(|()| value)
    }

    /// Its schema in a request, where null is as good as its absence.
    fn asked(&self, default: String) -> RefOr<Schema> {
        let description = self.described(Some(format!("Default: {default}.")));
        match self.form {
            Form::Word { schema, .. } => OneOfBuilder::new()
                .item(reference(schema, description))
                .item(ObjectBuilder::new().schema_type(Type::Null))
                .default(Some(Json::Null))
                .into(),
            Form::Size | Form::Number => self
                .number([Type::Integer, Type::Null].into_iter().collect(), description)
                .default(Some(Json::Null))
                .minimum(self.bounds.map(|(least, _)| least))
                .maximum(self.bounds.map(|(_, most)| most))
                .into(),
        }
    }

    /// Its schema in an answer.
    fn answered(&self) -> RefOr<Schema> {
        let description = self.described(self.zero.map(|zero| format!("0: {zero}.")));
        match self.form {
            Form::Word { schema, .. } => reference(schema, description).into(),
            Form::Size | Form::Number => {
                self.number(Type::Integer.into(), description).minimum(Some(0_u64)).into()
            }
        }
    }

    fn number(&self, kind: SchemaType, description: String) -> ObjectBuilder {
        let format = if self.form == Form::Size { KnownFormat::Int64 } else { KnownFormat::Int32 };
        ObjectBuilder::new()
            .schema_type(kind)
            .format(Some(SchemaFormat::KnownFormat(format)))
            .description(Some(description))
    }
}

fn reference(schema: &str, description: String) -> Ref {
    RefBuilder::new().ref_location_from_schema_name(schema).description(Some(description)).build()
}

/// The type of a setting.
trait Value: Copy {
    const FORM: Form;

    /// Reads what a person wrote.
    fn read(text: &str) -> Option<Self>;

    /// The number, if it is one.
    fn number(self) -> Option<u64>;

    /// The value as a person writes it.
    fn written(self) -> String;
}

impl Value for u64 {
    const FORM: Form = Form::Size;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok().map(|ByteSize(bytes)| bytes)
    }

    fn number(self) -> Option<u64> {
        Some(self)
    }

    fn written(self) -> String {
        ByteSize(self).to_string()
    }
}

impl Value for u32 {
    const FORM: Form = Form::Number;

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn number(self) -> Option<u64> {
        Some(self.into())
    }

    fn written(self) -> String {
        self.to_string()
    }
}

impl Value for Priority {
    const FORM: Form = Form::Word { schema: "Priority", words: &["low", "normal", "high"] };

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn number(self) -> Option<u64> {
        None
    }

    fn written(self) -> String {
        self.to_string()
    }
}

/// A request for a group of settings: each as given, if it is.
pub trait SettingsRequest: Copy + Default {
    /// The settings with their values.
    type Settings: Copy + Default;

    /// The settings, in order.
    const SETTINGS: &'static [Setting];

    /// Gives a setting by its option, in the form that people write, or takes it back. False if the group has no such option.
    ///
    /// # Errors
    /// The text is no value of the setting.
    fn set(&mut self, option: &str, text: Option<&str>) -> Result<bool, SettingError>;

    /// The settings that this request gives, and the rest of `base`.
    ///
    /// # Errors
    /// A value is out of bounds.
    fn over(self, base: Self::Settings) -> Result<Self::Settings, SettingError>;

    /// The settings that this request gives, and the rest of `other`.
    #[must_use]
    fn or(self, other: Self) -> Self;

    /// The request that leaves settings as they are. A value that no request can give is not in it.
    fn keeping(settings: Self::Settings) -> Self;

    /// The settings, each with whether two VMs have the same value of it.
    fn compare(one: &Self::Settings, other: &Self::Settings) -> Vec<(&'static Setting, bool)>;
}

/// The schema of a group in a request for a VM, whose size may supply the settings.
pub(super) fn asked_of_vm<R: SettingsRequest>() -> Object {
    asked::<R>(|default| format!("that of the size, else {default}"))
}

/// The schema of a group in a request for what has no size.
pub(super) fn asked_alone<R: SettingsRequest>() -> Object {
    asked::<R>(|default| default)
}

fn asked<R: SettingsRequest>(default: impl Fn(String) -> String) -> Object {
    let asked = |group: ObjectBuilder, setting: &Setting| {
        group.property(setting.name, setting.asked(default(setting.default())))
    };
    let closed = AdditionalProperties::FreeForm(false);
    R::SETTINGS.iter().fold(ObjectBuilder::new().additional_properties(Some(closed)), asked).build()
}

/// The schema of a group in an answer.
pub(super) fn answered<R: SettingsRequest>() -> Object {
    let answered = |group: ObjectBuilder, setting: &Setting| {
        group.property(setting.name, setting.answered()).required(setting.name)
    };
    R::SETTINGS.iter().fold(ObjectBuilder::new(), answered).build()
}

/// Declares groups of settings.
///
/// A row is `name "option": type in least..=most = default, "meaning of 0";`. The first line of its comment is its title, to which
/// descriptions add the unit in which the name ends. `stored` is what serde has to know of its field in the state file. Tenants may give a
/// setting that has `tenants(may_give)`: the daemon has a limit of it, it is within a quota, or it concerns the VM alone.
macro_rules! settings {
    ($(
        $(#[doc = $title:literal])+
        $group:ident $quoted:literal, $request:ident, $stored:ident {$(
            $(#[doc = $about:literal])+
            $(#[stored($($as_stored:tt)+)])?
            $(#[tenants($tenants:ident)])?
            $name:ident $option:literal: $type:ident $(in $least:tt..=$most:tt)? = $default:expr $(, $zero:literal)?;
        )+}
    )+) => {$(
        $(#[doc = $title])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $group {
            $($(#[doc = $about])+ pub $name: $type,)+
        }

        impl Default for $group {
            fn default() -> Self {
                Self { $($name: $default),+ }
            }
        }

        #[doc = concat!("A request for [`", $quoted, "`].")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $request {
            $($(#[doc = $about])+ pub $name: Option<$type>,)+
        }

        #[doc = concat!("[`", $quoted, "`] in the state file, for serde's `with`.")]
        // Its own default is never used, but serde demands it; what a file does not say is as in the group's.
        #[derive(Debug, Default, Serialize, Deserialize)]
        #[serde(remote = $quoted, default, deny_unknown_fields)]
        pub struct $stored {
            $($(#[serde($($as_stored)+)])? $name: $type,)+
        }

        impl SettingsRequest for $request {
            type Settings = $group;

            const SETTINGS: &'static [Setting] = &[$(Setting {
                name: stringify!($name),
                option: $option,
                form: <$type as Value>::FORM,
                for_tenants: settings!(@tenants $($tenants)?),
                about: &[$($about),+],
                bounds: settings!(@bounds $($least $most)?),
                default: || <$type as Value>::written($default),
                zero: settings!(@zero $($zero)?),
            }),+];

            fn set(&mut self, option: &str, text: Option<&str>) -> Result<bool, SettingError> {
                let Some(setting) = Self::SETTINGS.iter().find(|setting| setting.option == option) else {
                    return Ok(false);
                };
                match option {
                    $($option => self.$name = text.map(|text| setting.read(text)).transpose()?,)+
                    _ => return Ok(false),
                }
                Ok(true)
            }

            fn over(self, base: $group) -> Result<$group, SettingError> {
                let mut settings = Self::SETTINGS.iter();
                $(if let (Some(setting), Some(value)) = (settings.next(), self.$name) {
                    setting.check(value)?;
                })+
                Ok($group { $($name: self.$name.unwrap_or(base.$name)),+ })
            }

            fn or(self, other: Self) -> Self {
                Self { $($name: self.$name.or(other.$name)),+ }
            }

            fn keeping(settings: $group) -> Self {
                let mut all = Self::SETTINGS.iter();
                Self {$(
                    $name: all.next().and_then(|setting| setting.check(settings.$name).ok()).map(|()| settings.$name),
                )+}
            }

            fn compare(one: &$group, other: &$group) -> Vec<(&'static Setting, bool)> {
                Self::SETTINGS.iter().zip([$(one.$name == other.$name),+]).collect()
            }
        }
    )+};
    (@bounds) => { None };
    (@bounds $least:tt $most:tt) => { Some(($least as u64, $most as u64)) };
    (@tenants) => { false };
    (@tenants may_give) => { true };
    (@zero) => { None };
    (@zero $zero:literal) => { Some($zero) };
}

settings! {
    /// Memory of a VM beside its quota, and within it.
    MemoryShare "MemoryShare", MemoryShareRequest, MemoryShareStored {
        /// Part of the quota that is guaranteed.
        /// The rest is available while no other VM has it.
        #[stored(rename = "guaranteed")]
        #[tenants(may_give)]
        guaranteed_bytes "guaranteed": u64 in 0..=BYTES = 0;
        /// Allowance beside the quota.
        /// Memory that the driver takes for the VM is charged to it first.
        #[stored(rename = "headroom")]
        #[tenants(may_give)]
        headroom_bytes "headroom": u64 in 0..=BYTES = 0;
        /// Limit of pinned guest memory.
        #[stored(rename = "pinned")]
        #[tenants(may_give)]
        pinned_bytes "pinned": u64 in 0..=BYTES = 0, "no limit";
    }

    /// Share of a unit's time.
    TimeShare "TimeShare", TimeShareRequest, TimeShareStored {
        /// Share of GPU time relative to other VMs.
        #[tenants(may_give)]
        weight "weight": u32 in 1..=10_000 = 100;
        /// Scheduling priority.
        #[tenants(may_give)]
        priority "priority": Priority = Priority::Normal;
        /// Upper limit of a unit's time.
        #[tenants(may_give)]
        cap_permille "cap": u32 in 1..=1000 = 0, "no limit";
        /// Guaranteed part of a unit's time.
        /// It is available on demand.
        #[tenants(may_give)]
        guarantee_permille "guarantee": u32 in 0..=1000 = 0;
    }

    /// Rules by which Sluice acts on a VM by itself.
    Rules "Rules", RulesRequest, RulesStored {
        /// Time from a fence by a policy or a tenant to automatic readmission.
        #[stored(rename = "readmit_after")]
        #[tenants(may_give)]
        readmit_after_seconds "readmit-after": u32 in 1..=NUMBER = 0, "only an operator readmits it";
        /// Time without a completion of submitted work after which a worker is killed.
        #[stored(rename = "hang_after")]
        #[tenants(may_give)]
        hang_after_seconds "hang-after": u32 in 1..=4_294_967 = 0, "never";
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;
    use crate::v1::{Size, SizeRequest, VmRequest};

    // Promise: A1
    #[test]
    fn settings_are_fields_of_requests_and_answers_like_others() {
        let request: VmRequest = from_value(
            json!({ "size": "small", "weight": 7, "pinned_bytes": null, "hang_after_seconds": 3 }),
        )
        .expect("a request");
        assert_eq!((request.time.weight, request.rules.hang_after_seconds), (Some(7), Some(3)));
        for unknown in [json!({ "colour": 1 }), json!({ "time": {} }), json!({ "weight": "7" })] {
            assert!(from_value::<VmRequest>(unknown.clone()).is_err(), "{unknown} was taken");
        }
        let missing = from_value::<SizeRequest>(json!({ "weight": 7 })).map(|_| ());
        assert!(missing.is_err_and(|error| error.to_string().contains("memory_bytes")));
        let text = json!({
            "id": "small", "memory_bytes": 8, "guaranteed_bytes": 0, "headroom_bytes": 0, "pinned_bytes": 0, "weight": 100,
            "priority": "normal", "cap_permille": 0, "guarantee_permille": 0
        });
        let size: Size = from_value(text.clone()).expect("a size");
        let written = to_value(size).expect("JSON");
        for (name, value) in text.as_object().expect("an object") {
            assert_eq!(&written[name], value, "{name}");
        }
    }

    // Promise: A1
    #[test]
    fn value_at_a_bound_is_taken_and_value_beyond_is_not() {
        fn check<R: SettingsRequest + for<'a> Deserialize<'a>>() {
            for Setting { name, option, bounds, .. } in R::SETTINGS {
                let Some((least, most)) = *bounds else { continue };
                let with = |value: u64| from_value::<R>(json!({ *name: value })).expect("a request");
                for (value, good) in [(least, true), (most, true), (most + 1, false)] {
                    assert_eq!(with(value).over(R::Settings::default()).is_ok(), good, "{name} of {value}");
                    assert_eq!(
                        R::default().set(option, Some(&value.to_string())),
                        good.then_some(true).ok_or(SettingError::OutOfBounds { name, value, least, most })
                    );
                }
            }
        }
        check::<MemoryShareRequest>();
        check::<TimeShareRequest>();
        check::<RulesRequest>();
    }

    #[test]
    fn request_is_over_a_size_and_keeps_the_rest() {
        let size = TimeShare { weight: 7, cap_permille: 300, ..TimeShare::default() };
        let request = TimeShareRequest { cap_permille: Some(500), ..TimeShareRequest::default() };
        let settings = request.over(size).expect("within bounds");
        assert_eq!(settings, TimeShare { cap_permille: 500, ..size });
        assert_eq!(TimeShareRequest::keeping(settings).over(TimeShare::default()), Ok(settings));
        let compared = TimeShareRequest::compare(&size, &settings).into_iter();
        let differ: Vec<_> = compared.filter(|(_, same)| !same).map(|(setting, _)| setting.name).collect();
        assert_eq!(differ, ["cap_permille"]);
    }

    #[test]
    fn description_names_the_unit_and_the_default() {
        let described = |group: Object, name: &str| {
            to_value(&group.properties[name]).expect("JSON")["description"].as_str().map(str::to_owned)
        };
        let asked = |of| described(of, "pinned_bytes").expect("a description");
        assert_eq!(
            asked(asked_of_vm::<MemoryShareRequest>()),
            "Limit of pinned guest memory, in bytes. Default: that of the size, else no limit."
        );
        assert_eq!(
            asked(asked_alone::<MemoryShareRequest>()),
            "Limit of pinned guest memory, in bytes. Default: no limit."
        );
        assert_eq!(
            asked(answered::<MemoryShareRequest>()),
            "Limit of pinned guest memory, in bytes. 0: no limit."
        );
    }
}
