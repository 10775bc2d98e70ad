//! Draws bar plots as SVG, which browsers and code hosts show.

use std::{fs, path::Path};

use anyhow::Context as _;
use svg::{
    Document,
    node::element::{Line, Rectangle, Text},
};

/// A plot with horizontal bars below a heading.
pub struct Plot {
    /// The heading, which says what the bars compare.
    pub title: String,
    /// Lines below the heading, such as the machine and the source of the figures.
    pub notes: Vec<String>,
    /// Unit of the values, which the axis shows.
    pub unit: String,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

/// One bar of a plot, from 0 to the median, with a line from minimum to maximum.
pub struct Bar {
    /// Name of the bar's quantity.
    pub label: String,
    /// Smallest value, where the thin line begins.
    pub min: f64,
    /// Median, where the bar ends.
    pub median: f64,
    /// Greatest value, where the thin line ends.
    pub max: f64,
    /// Whether the bar is a reference for the other bars, and so has another colour.
    pub is_reference: bool,
}

const WIDTH: f64 = 900.0;
/// Left end of the bars; their labels are left of it.
const LEFT: f64 = 380.0;
/// Right end of the longest line from minimum to maximum. The bar's median, as a number, is right of the line.
const RIGHT: f64 = 820.0;
const ROW: f64 = 20.0;
const LINE: f64 = 16.0;
const MARGIN: f64 = 12.0;
const FONT: &str = "system-ui, sans-serif";
/// Fill colours of bars and of reference bars, from the palette of Okabe and Ito: they stand out from white, and people
/// with colour blindness can tell them apart.
const BAR: &str = "#0072b2";
const REFERENCE: &str = "#999999";
const INK: &str = "#222222";

impl Plot {
    /// Writes the plot to a file.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> anyhow::Result<()> {
        fs::write(file, self.svg().to_string())
            .with_context(|| format!("writing the plot {}", file.display()))
    }

    fn svg(&self) -> Document {
        let head = MARGIN + LINE * (self.notes.len() as f64 + 2.0);
        let height = head + ROW * self.bars.len() as f64 + LINE + MARGIN;
        let mut document = Document::new()
            .set("viewBox", (0, 0, WIDTH, height))
            .set("width", WIDTH)
            .set("font-family", FONT)
            .set("font-size", 12)
            .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "white"))
            .add(text(&self.title, MARGIN, MARGIN + LINE).set("font-size", 15).set("font-weight", "bold"));
        for (index, note) in self.notes.iter().enumerate() {
            let y = MARGIN + LINE * (index as f64 + 2.0);
            document = document.add(text(note, MARGIN, y).set("fill", "#666666").set("font-size", 11));
        }
        for (index, bar) in self.bars.iter().enumerate() {
            document = self.bar(document, bar, head + ROW * index as f64);
        }
        document.add(text(&self.unit, LEFT, height - MARGIN))
    }

    fn bar(&self, document: Document, bar: &Bar, top: f64) -> Document {
        let x = |value: f64| LEFT + (RIGHT - LEFT) * value.max(0.0) / self.longest();
        let middle = top + ROW / 2.0;
        let fill = if bar.is_reference { REFERENCE } else { BAR };
        let rectangle = Rectangle::new()
            .set("x", LEFT)
            .set("y", top + 3.0)
            .set("width", x(bar.median) - LEFT)
            .set("height", ROW - 6.0)
            .set("fill", fill);
        let spread = Line::new()
            .set("x1", x(bar.min))
            .set("x2", x(bar.max))
            .set("y1", middle)
            .set("y2", middle)
            .set("stroke", INK)
            .set("stroke-width", 1.5);
        document
            .add(text(&bar.label, LEFT - 8.0, middle + 4.0).set("text-anchor", "end"))
            .add(rectangle)
            .add(spread)
            .add(text(&number(bar.median), x(bar.max) + 6.0, middle + 4.0))
    }

    fn longest(&self) -> f64 {
        self.bars.iter().map(|bar| bar.max).fold(f64::MIN_POSITIVE, f64::max)
    }
}

fn text(content: &str, x: f64, y: f64) -> Text {
    Text::new(content).set("x", x).set("y", y).set("fill", INK)
}

/// A value as text: no decimals from 100 on, one from 10 on, else two.
fn number(value: f64) -> String {
    match value.abs() {
        at if at >= 100.0 => format!("{value:.0}"),
        at if at >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(label: &str, median: f64, is_reference: bool) -> Bar {
        Bar { label: label.to_owned(), min: median * 0.9, median, max: median * 1.25, is_reference }
    }

    #[test]
    fn longest_bar_fits_and_labels_are_escaped() {
        let plot = Plot {
            title: "a < b & c".to_owned(),
            notes: vec!["machine".to_owned()],
            unit: "ns".to_owned(),
            bars: vec![bar("program", 80.0, false), bar("floor", 40.0, true)],
        };
        let svg = plot.svg().to_string();
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
        assert!(svg.contains(&format!("width=\"{}\"", (RIGHT - LEFT) * 80.0 / 100.0)), "{svg}");
        assert!(svg.contains(&format!("x2=\"{RIGHT}\"")), "{svg}");
        assert!(svg.contains(REFERENCE), "{svg}");
    }

    #[test]
    fn numbers_below_100_have_decimals() {
        assert_eq!([0.5, 13.04, 512.3].map(number), ["0.50", "13.0", "512"]);
    }
}
