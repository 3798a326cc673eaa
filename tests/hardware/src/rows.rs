//! Rows of measurements: a figure natively and through Sluice, their ratio, and the aim.

use serde::Serialize;
use serde_json::Value;

use crate::measure::quantile;
use crate::step::Step;
use crate::stop::Answer;

/// Key of the note that holds the rows of a step.
const NOTE: &str = "rows";

/// The aim of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Aim {
    /// The figure through Sluice lies in this range.
    Remoted(f64, f64),
    /// The ratio is at most this.
    RatioAtMost(f64),
    /// The ratio is at least this.
    RatioAtLeast(f64),
    /// The figure is shown only.
    None,
}

impl Aim {
    /// The aim in words.
    fn words(self) -> Option<String> {
        match self {
            Aim::Remoted(least, most) if least <= 0.0 => Some(format!("remoted ≤ {most}")),
            Aim::Remoted(least, most) if most.is_infinite() => Some(format!("remoted ≥ {least}")),
            Aim::Remoted(least, most) => Some(format!("remoted {least} to {most}")),
            Aim::RatioAtMost(most) => Some(format!("ratio ≤ {most}")),
            Aim::RatioAtLeast(least) => Some(format!("ratio ≥ {least}")),
            Aim::None => None,
        }
    }

    /// True if the figures meet it; `None` if there is no aim or no figure.
    fn is_met(self, remoted: Option<f64>, ratio: Option<f64>) -> Option<bool> {
        match self {
            Aim::Remoted(least, most) => remoted.map(|figure| (least..=most).contains(&figure)),
            Aim::RatioAtMost(most) => ratio.map(|ratio| ratio <= most),
            Aim::RatioAtLeast(least) => ratio.map(|ratio| ratio >= least),
            Aim::None => None,
        }
    }
}

/// A row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    name: String,
    unit: &'static str,
    native: Option<f64>,
    remoted: Option<f64>,
    ratio: Option<f64>,
    aim: Option<String>,
    met: Option<bool>,
}

impl Row {
    /// A row of the medians of rounds; a side without rounds has no figure.
    pub(crate) fn new(
        name: impl Into<String>,
        unit: &'static str,
        native: &[f64],
        remoted: &[f64],
        aim: Aim,
    ) -> Row {
        let [native, remoted] =
            [native, remoted].map(|rounds| (!rounds.is_empty()).then(|| significant(quantile(rounds, 0.5))));
        let ratio = match (native, remoted) {
            (Some(native), Some(remoted)) if native > 0.0 => Some(significant(remoted / native)),
            _ => None,
        };
        let met = aim.is_met(remoted, ratio);
        Row { name: name.into(), unit, native, remoted, ratio, aim: aim.words(), met }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The figures natively and through Sluice.
    pub(crate) const fn figures(&self) -> [Option<f64>; 2] {
        [self.native, self.remoted]
    }
}

/// Notes the rows so far. A step that is killed keeps those of its last note.
pub(crate) fn note(step: &Step, rows: &[Row]) -> Answer {
    step.note(NOTE, rows)
}

/// Four significant digits.
fn significant(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().unwrap_or(figure)
}

/// A number of an answer.
pub(crate) fn number(answer: &Value, key: &str) -> Answer<f64> {
    let number = answer.get(key).and_then(Value::as_f64);
    number.ok_or_else(|| crate::stop::Stop::failed(format!("the answer {answer} has no number {key}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_has_medians_and_their_ratio() {
        let row = Row::new("a", "us", &[2.0, 4.0, 100.0], &[8.0, 8.0, 8.0], Aim::RatioAtMost(2.0));
        assert_eq!(
            (row.native, row.remoted, row.ratio, row.met),
            (Some(4.0), Some(8.0), Some(2.0), Some(true))
        );
        assert_eq!(row.aim.as_deref(), Some("ratio ≤ 2"));
        assert_eq!(Row::new("a", "us", &[1.0], &[3.0], Aim::RatioAtMost(2.0)).met, Some(false));
    }

    #[test]
    fn missing_side_has_no_ratio_and_meets_no_aim_of_a_ratio() {
        let row = Row::new("a", "us", &[], &[3.0], Aim::RatioAtLeast(2.0));
        assert_eq!((row.native, row.ratio, row.met), (None, None, None));
        assert_eq!(Row::new("a", "us", &[], &[3.0], Aim::Remoted(0.0, 3.0)).met, Some(true));
        assert_eq!(Row::new("a", "us", &[0.0], &[3.0], Aim::None).ratio, None);
    }

    #[test]
    fn figures_have_four_digits() {
        assert_eq!([1234.567, 0.012_345_6, 9.999_96].map(significant), [1235.0, 0.01235, 10.0]);
    }

    #[test]
    fn aims_are_in_words() {
        let words =
            [Aim::Remoted(0.0, 0.35), Aim::Remoted(2.0, 4.5), Aim::Remoted(0.9, f64::INFINITY), Aim::None]
                .map(Aim::words);
        let words = words.iter().map(Option::as_deref).collect::<Vec<_>>();
        assert_eq!(words, [Some("remoted ≤ 0.35"), Some("remoted 2 to 4.5"), Some("remoted ≥ 0.9"), None]);
    }
}
