//! Pictures in SVG, as plain text: lines over categories, and bars of stacked parts. Legible on light and dark pages.

use std::fmt::Write as _;

/// Colours of lines and parts: of middle brightness, for light and dark pages.
const COLOURS: [&str; 6] = ["#3b82f6", "#e8710a", "#2e9d57", "#c2367e", "#8e6bd1", "#7a8794"];
const WIDTH: f64 = 720.0;
/// The area of the lines: left, right, top and bottom edge.
const AREA: [f64; 4] = [64.0, 700.0, 40.0, 250.0];
/// Height of a line of text.
const LINE: f64 = 18.0;

/// The scale of the upright axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// From 0.
    Linear,
    /// Powers of ten.
    Logarithmic,
}

/// Lines over categories, which stand at equal distances.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) title: &'static str,
    /// The text under the categories.
    pub(super) across: &'static str,
    pub(super) categories: Vec<String>,
    pub(super) scale: Scale,
    /// Each with its name; a category without a figure has no point.
    pub(super) lines: Vec<(&'static str, Vec<Option<f64>>)>,
}

/// Bars of stacked parts. Each bar has the whole width.
#[derive(Debug)]
pub(super) struct Bars {
    pub(super) title: &'static str,
    pub(super) bars: Vec<Bar>,
}

/// A bar.
#[derive(Debug)]
pub(super) struct Bar {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    /// Each with its name.
    pub(super) parts: Vec<(String, f64)>,
}

impl Lines {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        let [left, right, top, bottom] = AREA;
        #[expect(clippy::cast_precision_loss, reason = "a few lines")]
        let height = bottom + 44.0 + LINE * self.lines.len() as f64;
        let mut text = begin(self.title, height);
        let ticks = self.ticks();
        let (low, high) = (ticks.first().copied().unwrap_or(0.0), ticks.last().copied().unwrap_or(1.0));
        let along = |figure: f64| match self.scale {
            Scale::Linear => (figure - low) / (high - low),
            Scale::Logarithmic => (figure / low).log10() / (high / low).log10(),
        };
        let y = |figure: f64| bottom - along(figure).clamp(0.0, 1.0) * (bottom - top);
        #[expect(clippy::cast_precision_loss, reason = "a few categories")]
        let x = |place: usize| {
            left + 20.0 + place as f64 * (right - left - 40.0) / (self.categories.len().max(2) - 1) as f64
        };
        for tick in ticks {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "<path d=\"M{left} {0:.1}H{right}\" class=\"grid\"/>", y(tick));
            label(&mut text, left - 8.0, y(tick) + 4.0, "end", &short(tick));
        }
        for (place, category) in self.categories.iter().enumerate() {
            label(&mut text, x(place), bottom + LINE, "middle", category);
        }
        label(&mut text, f64::midpoint(left, right), bottom + 2.0 * LINE, "middle", self.across);
        for (place, ((name, figures), colour)) in self.lines.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let points: Vec<String> = figures
                .iter()
                .enumerate()
                .filter_map(|(place, figure)| Some(format!("{:.1},{:.1}", x(place), y((*figure)?))))
                .collect();
            let _ = writeln!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                points.join(" ")
            );
            for point in &points {
                if let Some((x, y)) = point.split_once(',') {
                    let _ = writeln!(text, "<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{colour}\"/>");
                }
            }
            #[expect(clippy::cast_precision_loss, reason = "a few lines")]
            legend(&mut text, left, bottom + 34.0 + LINE * (place as f64 + 1.0), colour, name);
        }
        text + "</svg>\n"
    }

    /// Figures of the upright axis, ascending.
    fn ticks(&self) -> Vec<f64> {
        let figures = || self.lines.iter().flat_map(|(_, figures)| figures.iter().flatten().copied());
        let high = figures().fold(0.0, f64::max);
        match self.scale {
            Scale::Linear => {
                let step = step(high / 5.0);
                let mut ticks = vec![0.0];
                while ticks.last().is_some_and(|last| *last < high) {
                    #[expect(clippy::cast_precision_loss, reason = "a few ticks")]
                    ticks.push(step * ticks.len() as f64);
                }
                ticks
            }
            Scale::Logarithmic => {
                let low = figures().filter(|figure| *figure > 0.0).fold(f64::MAX, f64::min).min(high);
                if low <= 0.0 {
                    return vec![1.0, 10.0];
                }
                #[expect(clippy::cast_possible_truncation, reason = "a power of ten")]
                let [first, last] = [low.log10().floor() as i32, high.log10().ceil() as i32];
                (first..=last.max(first + 1)).map(|power| 10f64.powi(power)).collect()
            }
        }
    }
}

/// The least step of one significant digit, 1, 2 or 5, that is not below this one.
fn step(least: f64) -> f64 {
    if least <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= least).unwrap_or(least)
}

impl Bars {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        const BAR: f64 = 26.0;
        let [left, right] = [12.0, 700.0];
        let mut body = String::new();
        let mut y = 44.0;
        for Bar { name, unit, parts } in &self.bars {
            let whole: f64 = parts.iter().map(|(_, figure)| figure).sum();
            label(&mut body, left, y + 12.0, "start", &format!("{name}: {} {unit}", short(whole)));
            y += LINE;
            let mut x = left;
            for ((_, figure), colour) in parts.iter().zip(COLOURS.iter().cycle()) {
                let width = figure / whole.max(f64::MIN_POSITIVE) * (right - left);
                let _ = writeln!(
                    body,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>"
                );
                x += width;
            }
            y += BAR;
            for ((part, figure), colour) in parts.iter().zip(COLOURS.iter().cycle()) {
                y += LINE;
                legend(&mut body, left, y, colour, &format!("{part}: {} {unit}", short(*figure)));
            }
            y += LINE;
        }
        begin(self.title, y) + &body + "</svg>\n"
    }
}

fn begin(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\n\
         <title>{title}</title>\n\
         <style>text{{font:13px sans-serif;fill:#333}}.grid{{stroke:#888;stroke-opacity:.35}}\
         @media(prefers-color-scheme:dark){{text{{fill:#ccc}}}}</style>\n\
         <text x=\"12\" y=\"22\" style=\"font-weight:bold\">{title}</text>\n"
    )
}

fn label(text: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn legend(text: &mut String, x: f64, y: f64, colour: &str, words: &str) {
    let _ = writeln!(
        text,
        "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>",
        y - 10.0
    );
    label(text, x + 18.0, y, "start", words);
}

/// A figure in a few letters.
fn short(figure: f64) -> String {
    let (figure, ending) = match figure {
        figure if figure >= 1e6 => (figure / 1e6, "M"),
        figure if figure >= 1e4 => (figure / 1e3, "k"),
        figure => (figure, ""),
    };
    let digits = match figure {
        figure if figure >= 100.0 || figure.fract() == 0.0 => 0,
        figure if figure >= 10.0 => 1,
        figure if figure >= 0.1 => 2,
        _ => 3,
    };
    let number = format!("{figure:.digits$}");
    let number = if digits > 0 { number.trim_end_matches('0').trim_end_matches('.') } else { &number };
    format!("{number}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(scale: Scale, figures: Vec<Option<f64>>) -> Lines {
        let categories = (0..figures.len()).map(|place| place.to_string()).collect();
        Lines { title: "t", across: "a", categories, scale, lines: vec![("l", figures)] }
    }

    #[test]
    fn points_stand_at_their_figures() {
        let svg = lines(Scale::Linear, vec![Some(0.0), None, Some(10.0)]).svg();
        assert!(svg.contains("points=\"84.0,250.0 680.0,40.0\""), "{svg}");
        let svg = lines(Scale::Logarithmic, vec![Some(1.0), Some(10.0), Some(100.0)]).svg();
        assert!(svg.contains("points=\"84.0,250.0 382.0,145.0 680.0,40.0\""), "{svg}");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn axis_ends_beyond_the_largest_figure() {
        assert_eq!(lines(Scale::Linear, vec![Some(7.0)]).ticks(), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(lines(Scale::Logarithmic, vec![Some(0.3), Some(40.0)]).ticks(), [0.1, 1.0, 10.0, 100.0]);
        assert_eq!(lines(Scale::Logarithmic, vec![Some(1.0)]).ticks(), [1.0, 10.0]);
    }

    #[test]
    fn picture_without_figures_has_an_axis() {
        for scale in [Scale::Linear, Scale::Logarithmic] {
            assert!(lines(scale, vec![None]).svg().contains("class=\"grid\""));
        }
    }

    #[test]
    fn parts_of_a_bar_fill_it() {
        let parts = vec![("one".to_owned(), 1.0), ("two".to_owned(), 3.0)];
        let svg = Bars { title: "t", bars: vec![Bar { name: "b", unit: "ms", parts }] }.svg();
        assert!(
            svg.contains("width=\"172.0\"") && svg.contains("x=\"184.0\"") && svg.contains("b: 4 ms"),
            "{svg}"
        );
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0, 0.125, 2.0, 12.34, 1500.0, 25_000.0, 2.5e6].map(short),
            ["0", "0.12", "2", "12.3", "1500", "25k", "2.5M"]
        );
    }
}
