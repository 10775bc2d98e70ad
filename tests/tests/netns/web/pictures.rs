//! Compares pages with the pictures of docs/web.md, so loosely that other data look the same: by the average colours of
//! the cells of a grid.
//!
//! `LB_WEB_SCREENSHOTS=docs/img cargo test -p lb-tests --test netns -- web::` writes the pictures instead.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use lb_tests::{browser::Browser, wait_for};

use super::{LIMIT, SIZES, Served, browser, few_clients, open};
use crate::bed::{Bed, vips};

/// Width and height of a cell in pixels: two lines of text.
const CELL: usize = 40;
/// The most by which each channel of a cell's average colour, from 0 to 255, may differ from the picture's. Text
/// changes a white cell by about 20.
const TOLERANCE: u64 = 6;
/// Percentage of cells that may differ by more than [`TOLERANCE`]. Other data change up to 1 %, a missing header at
/// least 20 %.
const MOST_PERCENT: usize = 8;

/// Ways to break the layout of a page.
const BREAKS: [(&str, &str); 3] = [
    ("no stylesheet", "document.querySelector('link[href$=\"style.css\"]').remove()"),
    ("no header", "document.querySelector('.bar').remove()"),
    ("half as wide", "document.querySelector('main').style.maxWidth = '640px'"),
];

/// The average colours of the cells of a picture, row by row.
#[derive(Debug, PartialEq, Eq)]
struct Grid {
    columns: usize,
    cells: Vec<[u64; 3]>,
}

impl Grid {
    /// Reads a picture in the format PNG, with 8 bits for each colour.
    fn read(picture: &[u8]) -> Result<Self> {
        let mut reader = png::Decoder::new(std::io::Cursor::new(picture)).read_info()?;
        let mut bytes = vec![0; reader.output_buffer_size().context("the picture is too large")?];
        let info = reader.next_frame(&mut bytes)?;
        let samples = info.color_type.samples();
        ensure!(samples >= 3 && info.bit_depth == png::BitDepth::Eight, "not in colours of 8 bits: {info:?}");
        let lines: Vec<&[u8]> = bytes.chunks_exact(info.line_size).collect();
        let columns = (info.width as usize).div_ceil(CELL);
        let cells =
            lines.chunks(CELL).flat_map(|lines| (0..columns).map(|column| average(lines, column, samples)));
        Ok(Self { columns, cells: cells.collect() })
    }

    /// Percentage of cells that differ by more than [`TOLERANCE`].
    fn difference(&self, other: &Self) -> Result<usize> {
        let (is, should) = ((self.columns, self.cells.len()), (other.columns, other.cells.len()));
        ensure!(is == should, "the sizes differ: columns and cells are {is:?}, not {should:?}");
        let differ =
            |(a, b): &(&[u64; 3], &[u64; 3])| a.iter().zip(*b).any(|(a, b)| a.abs_diff(*b) > TOLERANCE);
        let count = self.cells.iter().zip(&other.cells).filter(differ).count();
        Ok(count * 100 / self.cells.len().max(1))
    }
}

/// The average colour of the cell in this column of these lines, whose pixels have `samples` bytes each.
fn average(lines: &[&[u8]], column: usize, samples: usize) -> [u64; 3] {
    let (mut sum, mut pixels) = ([0; 3], 0);
    for line in lines {
        for pixel in line.chunks_exact(samples).skip(column * CELL).take(CELL) {
            for (sum, value) in sum.iter_mut().zip(pixel) {
                *sum += u64::from(*value);
            }
            pixels += 1;
        }
    }
    sum.map(|sum| sum / pixels.max(1))
}

/// A path below the workspace.
fn in_workspace(path: impl AsRef<Path>) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Percentage of cells in which the page looks different from the picture in docs/img.
fn difference(screenshot: &[u8], name: &str) -> Result<usize> {
    let path = in_workspace(format!("docs/img/web-{name}.png"));
    let documented = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Grid::read(screenshot)?.difference(&Grid::read(&documented)?)
}

/// Takes screenshots until one looks like the picture in docs/img, at most for [`LIMIT`]: pages need time to draw their
/// data. Returns the last screenshot, with the percentage of cells that differ.
fn settled(browser: &Browser, name: &str) -> (usize, Vec<u8>) {
    let look = || {
        let screenshot = browser.screenshot().unwrap();
        (difference(&screenshot, name).unwrap(), screenshot)
    };
    wait_for(LIMIT, || Some(look()).filter(|(found, _)| *found <= MOST_PERCENT)).unwrap_or_else(look)
}

/// Fails if the page does not look like its picture in the docs. Writes the picture instead if `$LB_WEB_SCREENSHOTS`
/// names a folder, relative to the workspace.
pub(super) fn compare(browser: &Browser, name: &str) {
    if let Some(folder) = std::env::var_os("LB_WEB_SCREENSHOTS") {
        let path = in_workspace(folder).join(format!("web-{name}.png"));
        return fs::write(path, browser.screenshot().unwrap()).unwrap();
    }
    let (found, screenshot) = settled(browser, name);
    eprintln!("{name}: {found} % of the cells differ from the picture in docs/img");
    if found > MOST_PERCENT {
        let path = std::env::temp_dir().join(format!("web-{name}.png"));
        fs::write(&path, screenshot).unwrap();
        panic!(
            "{found} % of the page differ from docs/img/web-{name}.png, more than {MOST_PERCENT} %: look at {}; if it \
             is as it should be, write the pictures of the docs again with LB_WEB_SCREENSHOTS=docs/img",
            path.display()
        );
    }
}

#[test]
fn page_without_its_layout_differs_from_its_picture() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3"]);
    bed.put("empty", vips(20), &[]);
    let _served = Served::start(&bed, &["--listen", "127.0.0.1:8088"]);
    let server = "127.0.0.1:8088".parse().unwrap();
    let traffic = few_clients(&bed);
    let browser = browser(&bed);
    browser.resize(SIZES[1], false).unwrap();
    let pages = [
        ("service", "/services/default/web"),
        ("explain", "/explain?from=198.51.100.2&to=10.96.0.10:80"),
        ("overview", "/"),
    ];
    for (name, path) in pages {
        for (what, script) in BREAKS {
            open(&browser, server, path);
            let (found, _) = settled(&browser, name);
            assert!(found <= MOST_PERCENT, "{name}: {found} % of the intact page differ");
            browser.run(script).unwrap();
            let found = difference(&browser.screenshot().unwrap(), name).unwrap();
            eprintln!("{name}, {what}: {found} %");
            assert!(found > MOST_PERCENT, "{name}, {what}: only {found} % of the broken page differ");
        }
    }
    drop(traffic);
}

#[test]
fn one_cell_of_four_that_differs_is_a_quarter() {
    let grid = |corner: u8| {
        let mut bytes = vec![200; 3 * (2 * CELL) * (2 * CELL)];
        for line in bytes.chunks_exact_mut(3 * 2 * CELL).take(CELL) {
            line[..3 * CELL].fill(corner);
        }
        Grid::read(&encode(&bytes, 2 * CELL)).unwrap()
    };
    let tolerated = 200 - u8::try_from(TOLERANCE).unwrap();
    let differences =
        [200, tolerated, tolerated - 1].map(|corner| grid(200).difference(&grid(corner)).unwrap());
    assert_eq!(differences, [0, 0, 25]);
    let other_size = Grid::read(&encode(&vec![200; 3 * CELL * CELL], CELL)).unwrap();
    assert!(other_size.difference(&grid(200)).is_err_and(|error| error.to_string().contains("sizes differ")));
}

/// A PNG picture of these RGB pixels, `width` in each line.
fn encode(pixels: &[u8], width: usize) -> Vec<u8> {
    let mut picture = Vec::new();
    let size = [width, pixels.len() / 3 / width].map(|size| u32::try_from(size).unwrap());
    let mut encoder = png::Encoder::new(&mut picture, size[0], size[1]);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    picture
}
