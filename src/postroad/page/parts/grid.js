// A table whose rows come from the server. Vue compares rows by their keys, so a row that somebody works with
// keeps its place in the document and its focus. All content is text.
export default {
  template: `
    <div class="pr-grid" role="region" :aria-label="caption" tabindex="0">
      <table role="table">
        <caption :class="titled ? 'pr-caption' : 'pr-hidden'">{{ caption }}</caption>
        <thead role="rowgroup">
          <tr role="row">
            <th v-for="column in columns" :key="column.title" scope="col" role="columnheader"
                :class="{ number: column.number }">{{ column.title }}</th>
            <th v-if="acts" scope="col" role="columnheader"><span class="pr-hidden">actions</span></th>
          </tr>
        </thead>
        <tbody role="rowgroup">
          <tr v-for="row in rows" :key="row.key" role="row" :class="{ selected: row.key === selected }">
            <td v-for="(cell, at) in row.cells" :key="at" role="cell" :data-title="columns[at].title"
                :class="[columns[at].number ? 'number' : '', cell.tone ? 'tone-' + cell.tone : '']">
              <div class="what">
              <button v-if="at === 0 && selectable" type="button" class="pr-open"
                      :aria-pressed="row.key === selected" @click="$emit('open', row.key)">{{ cell.text }}</button>
              <span v-else :class="{ chip: cell.chip, mono: cell.mono }">{{ cell.text }}</span>
              <small v-if="cell.below">{{ cell.below }}</small>
              </div>
            </td>
            <td v-if="acts" role="cell" class="acts">
              <button v-for="act in row.acts" :key="act" type="button" class="pr-act"
                      :aria-label="act + ' ' + row.cells[0].text"
                      @click="$emit('act', [act, row.key])">{{ act }}</button>
            </td>
          </tr>
        </tbody>
      </table>
      <p v-if="!rows.length" class="pr-empty">{{ loading ? "Asking the network …" : empty }}</p>
    </div>`,
  props: {
    caption: String,
    titled: Boolean,
    columns: Array,
    rows: Array,
    empty: String,
    loading: Boolean,
    selectable: Boolean,
    selected: String,
  },
  computed: {
    acts() {
      return this.rows.some((row) => row.acts && row.acts.length);
    },
  },
};
