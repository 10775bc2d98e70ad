//! Draws the screen of `top`.

use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Modifier, Style},
    text::Line,
    widgets::{Cell, Row as Cells, Table, TableState},
};

use super::model::{Column, Model, Row};
use crate::commands::output::scaled;

/// Width of a column that holds numbers, in characters.
const NUMBER: u16 = 10;

pub(super) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let [title, body, help] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Line::styled(model.title(), Style::new().add_modifier(Modifier::BOLD)), title);
    frame.render_widget(Line::raw(help_line(model)), help);
    let rows = model.rows();
    let lines = rows.iter().map(|row| Cells::new(Column::ALL.map(|column| cell(row, column))));
    let widths = Column::ALL.map(|column| match column {
        Column::Name => Constraint::Min(20),
        Column::New | Column::Packets | Column::Bytes | Column::Active => Constraint::Length(NUMBER),
    });
    let table = Table::new(lines, widths)
        .header(header(model))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected((!rows.is_empty()).then_some(model.cursor));
    frame.render_stateful_widget(table, body, &mut state);
}

fn header(model: &Model) -> Cells<'static> {
    let head = |column: Column| {
        let style = Style::new().add_modifier(Modifier::BOLD);
        let style = if column == model.sort { style.add_modifier(Modifier::UNDERLINED) } else { style };
        let text = match (column, model.inside) {
            (Column::Name, Some(_)) => "BACKEND".to_owned(),
            (Column::Name, None) => column.head().to_owned(),
            (Column::New | Column::Packets | Column::Bytes | Column::Active, _) => right(column.head()),
        };
        Cell::from(text).style(style)
    };
    Cells::new(Column::ALL.map(head))
}

pub(super) fn text(row: &Row, column: Column) -> String {
    match column {
        Column::Name => row.name.clone(),
        Column::New => number(row.new_flows),
        Column::Packets => number(row.packets),
        Column::Bytes => number(row.bytes),
        Column::Active => scaled(row.active_flows),
    }
}

fn cell(row: &Row, column: Column) -> Cell<'static> {
    let text = text(row, column);
    Cell::from(if column == Column::Name { text } else { right(&text) })
}

/// A rate as text: with one decimal below 10, rounded from 10 on, and with a unit from 1000 on, such as `12.3k`.
fn number(rate: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates are small and not negative"
    )]
    if rate > 0.0 && rate < 10.0 { format!("{rate:.1}") } else { scaled(rate.round() as u64) }
}

fn right(text: &str) -> String {
    format!("{text:>width$}", width = usize::from(NUMBER))
}

fn help_line(model: &Model) -> String {
    if model.typing {
        return format!("/{}_", model.filter);
    }
    let filter = if model.filter.is_empty() { String::new() } else { format!("  [{}]", model.filter) };
    let way = if model.inside.is_some() { "Esc services" } else { "Enter backends" };
    let keys = Column::ALL.map(|column| column.key().to_string()).join(" ");
    format!("{way}  sort: {keys}  / filter  q quit{filter}")
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::{super::model::Key, *};
    use crate::commands::top::model::tests::model;

    fn screen(model: &Model) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(64, 5)).unwrap();
        terminal.draw(|frame| draw(frame, model)).unwrap();
        let buffer = terminal.backend().buffer();
        let symbol = |x, y| buffer.cell((x, y)).map_or(" ", |cell| cell.symbol());
        let line = |y| (0..64).map(|x| symbol(x, y)).collect::<String>().trim_end().to_owned();
        (0..5).map(line).collect()
    }

    #[test]
    fn services_and_their_backends_are_drawn() {
        let mut model = model();
        let expected = [
            "Services",
            "SERVICE                   NEW/S  PACKETS/S    BYTES/S     ACTIVE",
            "default/web:http/TCP         10        200       1.2M          3",
            "default/dns/TCP               0          0          0          0",
            "Enter backends  sort: s n p b a  / filter  q quit",
        ];
        assert_eq!(screen(&model), expected);
        model.press(Key::Enter);
        let expected = [
            "Backends of default/web:http/TCP",
            "BACKEND                   NEW/S  PACKETS/S    BYTES/S     ACTIVE",
            "10.1.0.5:8080                10        200       1.2M          3",
            "10.1.0.6:8080                 0          0          0          0",
            "Esc services  sort: s n p b a  / filter  q quit",
        ];
        assert_eq!(screen(&model), expected);
    }

    #[test]
    fn filter_is_shown_while_typed_and_active() {
        let mut model = model();
        for letter in "/dn".chars() {
            model.press(Key::Letter(letter));
        }
        assert_eq!(screen(&model)[4], "/dn_");
        model.press(Key::Enter);
        assert_eq!(screen(&model)[4], "Enter backends  sort: s n p b a  / filter  q quit  [dn]");
    }

    #[test]
    fn small_rates_have_one_decimal() {
        assert_eq!([0.0, 0.25, 9.94, 10.4, 1234.5].map(number), ["0", "0.2", "9.9", "10", "1.2k"]);
    }
}
