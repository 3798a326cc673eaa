//! The settings of a VM as options of the command line.

use clap::{
    Arg, ArgMatches, Command,
    builder::PossibleValuesParser,
    error::{Error, ErrorKind},
};
use sluice_api::v1::{Form, Setting, SettingsRequest};

/// The options of a group of settings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SettingOptions<R>(pub(crate) R);

impl<R: SettingsRequest> clap::Args for SettingOptions<R> {
    fn augment_args(command: Command) -> Command {
        command.args(R::SETTINGS.iter().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn argument(setting: &Setting) -> Arg {
    let argument = Arg::new(setting.option).long(setting.option).help(setting.title());
    match setting.form {
        Form::Size => argument.value_name("SIZE"),
        Form::Number if setting.name.ends_with("_seconds") => argument.value_name("SECONDS"),
        Form::Number if setting.name.ends_with("_permille") => argument.value_name("THOUSANDTHS"),
        Form::Number => argument.value_name("N"),
        Form::Word { words, .. } => {
            argument.value_name("WORD").value_parser(PossibleValuesParser::new(words))
        }
    }
}

impl<R: SettingsRequest> clap::FromArgMatches for SettingOptions<R> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut options = Self::default();
        options.update_from_arg_matches(matches)?;
        Ok(options)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for Setting { option, .. } in R::SETTINGS {
            if let Some(text) = matches.get_one::<String>(option) {
                let set = self.0.set(option, Some(text));
                set.map_err(|error| {
                    Error::raw(ErrorKind::ValueValidation, format!("--{option}: {error}\n"))
                })?;
            }
        }
        Ok(())
    }
}
